# SPDX-License-Identifier: Apache-2.0
"""One layer's choice of pages: on the host, which looks at the scores, or on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_pyramid.methods.pages.choosing import Choosing, head_requests, parts_of
from vllm_pyramid.methods.pages.decode_rows import DecodeRows
from vllm_pyramid.methods.pages.kernels import device_page_ops, page_ops
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists, PageSelection
from vllm_pyramid.methods.pages.step_rows import Bounds
from vllm_pyramid.methods.pages.summaries import Summaries
from vllm_pyramid.step.attention_inputs import AttentionInputs, HeadRequests
from vllm_pyramid.step.failures import METHOD, SCORES, Failure, Failures
from vllm_pyramid.step.step import Step

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages import SelectPages

BLOCKS = 1, 0  # names of lists that have blocks


def names_of(step: Step) -> list[str]:
    return [request.request_id for request in step.requests]


class PageChooser:
    """Chooses by a scorer and the summaries that it has made; arguments as of `PageSelector`."""

    def __init__(self, selection: SelectPages, bounds: Bounds, summaries: Summaries) -> None:
        self._selection, self._bounds, self._summaries = selection, bounds, summaries

    def decode(self, inputs: AttentionInputs, step: Step | None, rows: DecodeRows) -> None:
        """Summarise the pages that the rows of a decode step fill, and list those that they read.

        Nothing here depends on the step except the contents of tensors that stay: it may be
        captured.
        """
        layer, count = inputs.layer, len(inputs.batch.seq_lens)
        names = inputs.head_names or BLOCKS
        for part in parts_of(count, rows.scores):
            budgets, lists = rows.budgets[layer][part], rows.lists.of_rows(part)
            pages = rows.batch(inputs, part)
            self._list(inputs, pages, budgets, rows.scores, lists, names, inputs.key_cache)
        if step is not None and rows.scores.device.type == "cpu":
            flag_lists(step.failures, names_of(step), rows.lists)

    def choose(
        self, inputs: AttentionInputs, step: Step, choosing: Choosing
    ) -> HeadRequests | None:
        """Choose for the rows of a step; return their KV heads as requests, if lists name them."""
        if isinstance(choosing.selection, PageSelection):
            self._select(inputs, step, choosing, choosing.selection)
            return None
        lists, requests = choosing.selection, None
        if choosing.head_starts is not None:
            requests = head_requests(inputs, lists, choosing.head_starts)
        names = BLOCKS if requests is None else inputs.head_names or BLOCKS
        query, keys = (
            choosing.queries_of(inputs.query),
            inputs.key_cache if choosing.fills else None,
        )
        for part in parts_of(len(choosing.requests), choosing.scores):
            budgets, chosen = choosing.budgets[inputs.layer][part], lists.of_rows(part)
            pages = choosing.batch(inputs, query, self._bounds.block_size, part)
            self._list(inputs, pages, budgets, choosing.scores, chosen, names, keys)
            pass_on(step.failures, choosing, part, chosen.unranked, inputs.query)
        if lists.unranked.device.type == "cpu":
            flag_lists(step.failures, choosing.request_ids, lists)
        return requests

    def _list(
        self,
        inputs: AttentionInputs,
        pages: PageBatch,
        budgets: torch.Tensor,
        scores: torch.Tensor,
        out: PageLists,
        names: tuple[int, int],
        key_cache: torch.Tensor | None = None,
    ) -> None:
        """Choose where the host does not wait; arguments as of `choose_pages`."""
        device_page_ops(inputs.ops).choose_pages(
            pages,
            inputs.softmax,
            self._summaries.multiplied(),
            budgets,
            scores,
            out,
            kind=self._selection.scorer.score_kind,
            combine=self._selection.combine,
            sinks=self._bounds.sinks,
            recent=self._bounds.recent,
            key_cache=key_cache,
            names=names,
        )

    def _select(
        self, inputs: AttentionInputs, step: Step, choosing: Choosing, selection: PageSelection
    ) -> None:
        bounds, ops = self._bounds, page_ops(inputs.ops)
        query = self._summaries.extend(choosing.queries_of(inputs.query))
        for part in parts_of(len(choosing.requests), choosing.scores):
            budgets, chosen = choosing.budgets[inputs.layer][part], selection.of_rows(part)
            pages = choosing.batch(inputs, query, bounds.block_size, part)
            scores = ops.score_pages(
                pages,
                inputs.softmax,
                self._summaries.multiplied(),
                kind=self._selection.scorer.score_kind,
                combine=self._selection.combine,
                out=choosing.scores,
            )
            fail_unranked(step.failures, choosing, part, scores, inputs.query)
            ops.select_pages(
                pages, scores, budgets, sinks=bounds.sinks, recent=bounds.recent, out=chosen
            )


_UNRANKED = Failure(
    SCORES, "its keys or queries have NaN or infinity, so its pages cannot be ranked"
)
_OTHER_COUNTS = Failure(METHOD, "its tables have other numbers of pages than were planned")


def fail_unranked(
    failures: Failures, choosing: Choosing, part: slice, scores: torch.Tensor, query: torch.Tensor
) -> None:
    """Let requests fail whose pages have NaN for scores, which are then replaced, in place.

    `scores` are `[rows of part, G, pages]` on the host, `query` `[T, H, D]`.
    """
    # Scores are weights, or -inf, so no sum of them is NaN unless one of them is.
    if not math.isnan(scores.sum()):
        return
    wrong = scores.flatten(1).sum(dim=1).isnan()
    failures.flag(_UNRANKED, choosing.request_ids[part], wrong)
    scores.masked_fill_(wrong[:, None, None], 0.0)
    pass_on(failures, choosing, part, wrong, query)


def pass_on(
    failures: Failures, choosing: Choosing, part: slice, wrong: torch.Tensor, query: torch.Tensor
) -> None:
    """Make the queries of failed rows NaN in a pipeline stage before the last one.

    The scheduler sees no failure there. With these queries the layers above fail, too.
    """
    if not failures.reports_evictions:
        return
    own = query[part] if choosing.tokens is None else query[choosing.tokens[part]]
    own = own.masked_fill(wrong[:, None, None], torch.nan)
    if choosing.tokens is None:
        query[part] = own
    else:
        query.index_copy_(0, choosing.tokens[part], own)


def flag_lists(failures: Failures, request_ids: Sequence[str], lists: PageLists) -> None:
    """Let the requests fail whose rows are flagged, or will be when the device has chosen."""
    rows = len(request_ids)
    failures.flag(_UNRANKED, request_ids, lists.unranked[:rows])
    failures.flag(_OTHER_COUNTS, request_ids, lists.miscounted[:rows])
