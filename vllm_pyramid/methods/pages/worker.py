# SPDX-License-Identifier: Apache-2.0
"""A worker's selection of pages: summaries of keys, and a table of pages for each KV head.

Shape legend: P blocks, G KV heads, N tokens of a block, D head size, R requests of the step, S rows
of attention, L layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_pyramid.methods.pages.choosing import Choosing
from vllm_pyramid.methods.pages.page_queries import PageQueries
from vllm_pyramid.methods.pages.reads import NAME, StepReads
from vllm_pyramid.methods.pages.refusals import check_result
from vllm_pyramid.methods.pages.step_rows import Bounds, FullPages, RowsOfStep, StepReadsPlan
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.failures import SCORES, Failure
from vllm_pyramid.step.hooks import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    WorkerContext,
)
from vllm_pyramid.step.step import Step, WorkerRequest

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages import SelectPages
    from vllm_pyramid.plan import IntArray
    from vllm_pyramid.policy.policy import Policy

_NO_NUMBERS = "its keys or queries have NaN or infinity, so its pages cannot be ranked"


class PageSelector(CacheHooks, StepHooks, LayerHooks, EvictionHooks):
    """The summaries of all layers, and what the current step chooses; one object a worker.

    Attributes:
        summaries: `[P, G, r * D]`: a block belongs to one layer at a time, so one tensor serves all
            layers. Entries of pages that are not full yet hold anything; nothing reads them.

    Raises:
        ValueError: layers have different numbers of KV heads, or different head sizes.
    """

    name = NAME

    def __init__(self, policy: Policy, selection: SelectPages, context: WorkerContext) -> None:
        self.selection, self.scorer, self.context = selection, selection.scorer, context
        shapes = {(spec.num_kv_heads, spec.head_size, spec.dtype) for spec in context.specs}
        if len(shapes) > 1:
            raise ValueError(
                f"policy {policy.name!r} keeps summaries of one shape next to the pages, and the "
                "layers of this model have different KV heads: choose a policy without `attend`"
            )
        self._kv_heads, self._head_size, self._dtype = shapes.pop()
        if self._dtype.itemsize == 1:  # whose numbers bfloat16 holds exactly
            self._dtype = torch.bfloat16
        self._bounds = Bounds(
            context.block_size,
            selection.sink_pages(context.block_size),
            selection.recent_pages(context.block_size),
            selection.min_context,
        )
        self.summaries = torch.empty(0)
        self._queries: PageQueries | None = None
        if self.scorer.needs_queries:
            shape = context.num_layers, self._kv_heads, context.block_size, self._head_size
            self._queries = PageQueries(*shape)
        # Of the current step; None in steps without requests.
        self._step: Step | None = None
        self._plan: StepReadsPlan | None = None
        self._choosing: Choosing | None = None
        self._filled: FullPages | None = None

    # Memory ---------------------------------------------------------------------------------------

    def bytes_per_block(self) -> int:
        return self._kv_heads * self.scorer.summary_rows * self._head_size * self._dtype.itemsize

    def bytes_of_buffers(self) -> int:
        if self._queries is None:
            return 0
        scheduler = self.context.config.scheduler_config
        return self._queries.bytes_of(scheduler.max_num_seqs)

    def allocate(self, num_blocks: int) -> None:
        self.summaries = torch.empty(0)  # two generations never exist together
        shape = num_blocks, self._kv_heads, self.scorer.summary_rows * self._head_size
        with torch.inference_mode(False):
            self.summaries = torch.zeros(shape, dtype=self._dtype, device=self.context.device)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.summaries[targets] = self.summaries[sources]

    # Every step -----------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Find which tokens choose pages, how many, and which pages the step fills."""
        budgets = np.stack([self._pages_of(request) for request in step.requests])
        self._step = step
        self._plan = plan = StepReadsPlan(step, budgets, self._bounds)
        self._choosing = Choosing.of(step, plan, self._kv_heads, self.selection.dense_layers)
        self._filled = FullPages.of(step, self._bounds.block_size)
        if self._queries is not None:
            self._queries.begin_step(step, self._filled)

    def forget(self, request_id: str) -> None:
        if self._queries is not None:
            self._queries.forget(request_id)

    def _pages_of(self, request: WorkerRequest) -> IntArray:
        """Return the pages that a request's tokens read at most: `[L]`."""
        pages: IntArray | None = request.state.get(NAME)
        if pages is None:
            pages = request.policy.attend.pages(
                request.initial.prompt_len, self.context.num_layers, self._bounds.block_size
            )
            request.state[NAME] = pages
        return pages

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        """Summarise the pages that are full now, and return tables of the pages that are read."""
        if self._step is None or self._plan is None:
            return inputs
        if inputs.layer < self.selection.dense_layers:
            self._plan.note_dense(inputs.layer)
            return inputs
        queries = None
        if self._queries is not None:
            queries = self._queries.take(inputs, fills=self._filled is not None)
        if self._filled is not None and self.scorer.summary_rows:
            self._summarise(inputs, self._filled, queries)
        if self._choosing is None:
            self._plan.note_dense(inputs.layer)
            return inputs
        return self._select(inputs, self._step, self._plan, self._choosing)

    def _summarise(
        self, inputs: AttentionInputs, filled: FullPages, queries: torch.Tensor | None
    ) -> None:
        table, requests = inputs.block_table, len(filled.starts)
        if self.scorer.summary_kind is not None:
            inputs.ops.summarise_pages(
                self.summaries,
                inputs.key_cache,
                table,
                torch.from_numpy(filled.starts),
                torch.from_numpy(filled.ends),
                inputs.batch.skips[:requests],
                kind=self.scorer.summary_kind,
            )
            return
        blocks = table[torch.from_numpy(filled.requests), torch.from_numpy(filled.pages)].long()
        self._summarise_blocks(inputs, blocks, queries)

    def _summarise_blocks(
        self, inputs: AttentionInputs, blocks: torch.Tensor, queries: torch.Tensor | None = None
    ) -> None:
        """Call the scorer's own `summarise`, or `represent`, for blocks, `[B]`.

        Args:
            queries: `[B, G, D]`, for `represent`.

        Raises:
            ValueError: it returned another shape, another type or NaN.
        """
        if not len(blocks):
            return
        keys = inputs.key_cache[blocks].float()
        if queries is None:
            found = self.scorer.summarise(keys)
        else:
            found = self.scorer.represent(keys, queries)
        shape = len(blocks), self._kv_heads, self.scorer.summary_rows * self._head_size
        check_result(self.scorer, "summarise", found, shape)
        self.summaries[blocks] = found.to(self._dtype)

    def _select(
        self, inputs: AttentionInputs, step: Step, plan: StepReadsPlan, choosing: Choosing
    ) -> AttentionInputs:
        """Choose the layer's pages, and return tables of them, until the next layer's call."""
        layer, batch, bounds = inputs.layer, inputs.batch, self._bounds
        query = batch.query if choosing.tokens is None else batch.query[choosing.tokens]
        if not self.scorer.has_kernels:
            found = self.scorer.extend(query.float())
            shape = *query.shape[:2], self.scorer.summary_rows * self._head_size
            check_result(self.scorer, "extend", found, shape)
            query = found
        pages = choosing.batch(inputs, query, bounds.block_size)
        scores = inputs.ops.score_pages(
            pages,
            inputs.softmax,
            self._pool(inputs),
            kind=self.scorer.score_kernel,
            combine=self.selection.combine,
            out=choosing.scores,
        )
        # Scores are weights, or -inf, so no sum of them is NaN unless one of them is.
        if math.isnan(scores.sum()):
            self._fail_unranked(step, choosing.rows, scores)
        chosen = inputs.ops.select_pages(
            pages,
            scores,
            choosing.budgets[layer],
            sinks=bounds.sinks,
            recent=bounds.recent,
            out=choosing.selection,
        )
        plan.note(layer, chosen.counts.numpy())
        table, seq_lens, skips = choosing.tables(inputs, bounds.block_size)
        return replace(
            inputs,
            batch=replace(
                batch,
                block_table=table,
                query_start_loc=choosing.starts,
                seq_lens=seq_lens,
                skips=skips,
                max_query_len=None,
                max_seq_len=None,
            ),
        )

    @staticmethod
    def _fail_unranked(step: Step, rows: RowsOfStep, scores: torch.Tensor) -> None:
        """Let requests fail whose pages have NaN for scores, which are then replaced, in place.

        Args:
            scores: `[S, G, pages]` of the rows that choose.
        """
        wrong = scores.isnan().flatten(1).any(dim=1)
        requests = {int(request) for request in rows.requests[rows.chosen][wrong.numpy()]}
        names = [step.requests[request].request_id for request in sorted(requests)]
        step.failures.add(names, Failure(SCORES, _NO_NUMBERS))
        scores[wrong] = 0.0

    def _pool(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return what queries are multiplied with, in the shape that the scorer's kernel reads."""
        if not self.scorer.summary_rows:
            return inputs.key_cache
        if self.scorer.score_kernel == "rows":
            return self.summaries.unflatten(2, (self.scorer.summary_rows, self._head_size))
        return self.summaries

    def end_step(self, step: Step) -> StepReads | None:
        """Return what the tokens behind the prompts read.

        Raises:
            PlanMismatchError: it is not what was planned.
        """
        begun, plan = self._step, self._plan
        self._step = self._plan = self._choosing = self._filled = None
        if begun is None or plan is None or not len(plan.requests):
            return None
        names = [request.request_id for request in begun.requests]
        failed = np.array([name in begun.failures.of for name in names], bool)
        plan.check(failed, names)
        if self.trace is not None:
            self.trace.add_reads(names, plan.requests, plan.read, plan.visible)

        def sums(of_tokens: np.ndarray) -> list[int]:
            found = np.bincount(plan.requests, weights=of_tokens, minlength=len(names))
            return [int(number) for number in found]

        return StepReads(
            names,
            sums(plan.read.sum(axis=0)),
            sums(plan.visible.sum(axis=0)),
            sums(np.ones(len(plan.requests))),
        )

    # An eviction ----------------------------------------------------------------------------------

    def after_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """Summarise the pages of the survivors, which hold other keys now."""
        inputs = batch.call
        if inputs.layer < self.selection.dense_layers or not self.scorer.summary_rows:
            return
        starts, ends = batch.lens - batch.keeps, batch.lens
        if self.scorer.summary_kind is not None:
            inputs.ops.summarise_pages(
                self.summaries,
                inputs.key_cache,
                batch.tables,
                starts,
                ends,
                starts,
                kind=self.scorer.summary_kind,
            )
            return
        size = self._bounds.block_size
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            # The last page may not be full; then it is summarised again when it is.
            self._summarise_blocks(inputs, batch.tables[row, start // size : end // size].long())
