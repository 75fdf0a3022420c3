# SPDX-License-Identifier: Apache-2.0
"""The kernels that choose pages to attend to, in plain PyTorch, C++ and Triton: their contract.

A selecting layer calls `summarise_pages` after every write to its cache, chooses for the query
tokens that do, and calls `paged_attention` with the result. Where the host looks at the scores it
chooses by `score_pages` and `select_pages` (`PageOps`: the reference and C++), on a device by
`choose_pages` (`DevicePageOps`: the reference and Triton).
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists, PageSelection


class SummaryOps(Protocol):
    """What each device type has; the rules are those of `Ops`."""

    def summarise_pages(
        self,
        summaries: torch.Tensor,
        key_cache: torch.Tensor,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        skips: torch.Tensor,
        *,
        kind: str,
        max_pages: int | None = None,
    ) -> None:
        """Compute the summaries of all pages that hold a position `>= starts[r]` again.

        A summary describes the keys that its page has in the cache now, at the positions `skips[r]
        .. seq_lens[r] - 1`, however they came there.

        - `box`: the largest, then the smallest number of each component (Quest, arXiv:2406.10774).
        - `spread`: the mean, then the standard deviation (of the keys present, not an estimate for
          more).

        Numbers are summed in float32 and rounded to the pool's dtype once. Numbers of 8-bit caches
        count as they are stored, without their scale. Nothing is written for requests with
        `starts[r] == seq_lens[r]`.

        Args:
            summaries: `[P, G, 2 * D]`, written.
            key_cache: `[P, G, N, D]`, read after the write of this step.
            block_table: `[>= R, M]` int32.
            starts: `[R]` int32, the first position of each request whose key was written since its
                last call; an eviction, which moves keys, starts at its new skip.
            seq_lens, skips: `[R]` int32, as in `AttentionBatch`.
            kind: one of `SUMMARY_KINDS`.
            max_pages: the largest number of pages that a request has to summarise.

        Raises:
            ValueError: `starts[r]` lies outside `0 .. seq_lens[r]`, or the pool does not fit.
        """


class PageOps(SummaryOps, Protocol):
    """The kernels of page selection where the host looks at the scores."""

    def score_pages(
        self,
        batch: PageBatch,
        softmax: Softmax,
        pool: torch.Tensor,
        *,
        kind: str,
        combine: str = "mean",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Score the candidates of each row: the softmax over pages, for each KV head.

        A page's logit in a query head is the product of the query q and the page's summary:

        - `box`: `max(q, 0) · largest + min(q, 0) · smallest`, which no key of the page exceeds.
        - `spread`: `q · mean + |q| · deviation`.
        - `rows`: the largest product with any of the page's n rows in the pool. A scorer of the
        user's own has one row, and a query that it has extended to the width of it.

        It is scaled and capped as attention's logits are. The softmax over the candidates (and the
        head's sink) is taken in each query head, then its mean or maximum over the query heads of a
        KV head.

        Args:
            softmax: its sinks lower the weights of their heads. A sliding window is refused.
            pool: `[P, G, 2 * D]`; for `rows` `[P, G, n, D]`.
            kind: one of `SCORE_KINDS`. combine: one of `COMBINES`.
            out: `[>= S, G, W]` float32, contiguous, to write the result to; W is at least
                `max_pages - 1`.

        Returns:
            `[S, G, max_pages - 1]` float32 (`out[:S]` if that was given): column i is the page
                `skips[s] // N + i`; -inf behind the last candidate.
        """

    def select_pages(
        self,
        batch: PageBatch,
        scores: torch.Tensor,
        budgets: torch.Tensor,
        *,
        sinks: int = 0,
        recent: int = 1,
        max_selected: int | None = None,
        out: PageSelection | None = None,
    ) -> PageSelection:
        """Choose the pages of each row and KV head: sinks, recent, best of the rest.

        Always chosen are the first `sinks` pages that the row sees, and its last `recent` ones, of
        which the very last is the query's own. The first page is also chosen if a part of it is
        hidden by the skip, so that all KV heads hide as many tokens. The rest of the budget goes to
        the candidates with the largest scores, and to the lower page where scores are equal. All KV
        heads of a row choose as many pages: the row's budget, but at least the pages that are
        always chosen and at most all that it sees; then the list is the row's whole table.

        The query of the batch is not read.

        Args:
            scores: `[S, G, >= max_pages - 1]` float32 without NaN, unit stride in the last
                dimension.
            budgets: `[S]` int32, in pages.
            sinks, recent: pages at the start and at the end that are always chosen; `recent` at
                least 1.
            max_selected: the width W of the result, at least the largest number of chosen pages.
            out: a selection of at least S rows to write the result to; its width is W.

        Returns:
            A selection of S rows (views of `out` if that was given).

        Raises:
            ValueError: a row's budget is not positive, or W is too small.
        """


class DevicePageOps(SummaryOps, Protocol):
    """The kernels of page selection where the host does not wait for the scores."""

    def choose_pages(
        self,
        batch: PageBatch,
        softmax: Softmax,
        pool: torch.Tensor,
        budgets: torch.Tensor,
        scores: torch.Tensor,
        out: PageLists,
        *,
        kind: str,
        combine: str = "mean",
        sinks: int = 0,
        recent: int = 1,
        key_cache: torch.Tensor | None = None,
        names: tuple[int, int] = (1, 0),
    ) -> None:
        """Score the candidates of each row, as `score_pages`, and list the best, as `select_pages`.

        - A row whose budget covers all that it sees lists it. It is not scored, and has no flag.
        - Where a score of a row and KV head is NaN, the row is flagged, and that head chooses as if
        all scores were 0.
        - What is read and written grows with the pages that a row sees, not with `max_pages`: no
        entry behind a list or behind the last candidate is.

        Args:
            batch: its `max_pages` must be known.
            pool: as of `score_pages`; written where `key_cache` is given.
            budgets: `[S]` int32, in pages.
            scores: `[>= S, H, >= max_pages - 1]` float32, contiguous, scratch. Afterwards it has
                the scores of each row's candidates and KV head g at the g-th query head of `H / G`;
                the rest may hold anything.
            out: of S rows.
            kind, combine: of `score_pages`. sinks, recent: of `select_pages`.
            key_cache: `[P, G, N, D]`: the page that a row's own token fills, if it is the last one
                of its page, is summarised too, as `summarise_pages` does it by this `kind`. Rows
                must belong to different requests then.
            names: block b is listed for KV head g as `b * names[0] + g * names[1]`.
        """


def page_ops(ops: Ops) -> PageOps:
    return ops.of_method(__name__)


def device_page_ops(ops: Ops) -> DevicePageOps:
    """Return the same where the host does not wait for the scores."""
    return ops.of_method(__name__)
