# SPDX-License-Identifier: Apache-2.0
"""A worker's selection of pages: a table of the pages that each KV head of a layer reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_pyramid.kernels.cpu.checks import MAX_HEAD_SIZE
from vllm_pyramid.methods.pages.chooser import PageChooser, flag_lists, names_of
from vllm_pyramid.methods.pages.choosing import ROWS_AT_ONCE, TILE, Choosing, Filling, padded
from vllm_pyramid.methods.pages.decode_rows import AT_ONCE, DecodeRows
from vllm_pyramid.methods.pages.kernels import device_page_ops
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists
from vllm_pyramid.methods.pages.reads import NAME, StepReads
from vllm_pyramid.methods.pages.step_rows import Bounds, StepReadsPlan
from vllm_pyramid.methods.pages.summaries import Summaries
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import CacheHooks, EvictionHooks, LayerHooks, StepHooks, WorkerContext
from vllm_pyramid.step.step import Step, WorkerRequest

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages import SelectPages
    from vllm_pyramid.plan import IntArray
    from vllm_pyramid.policy.policy import Policy


class PageSelector(CacheHooks, StepHooks, LayerHooks, EvictionHooks):
    """What the current step chooses, and the summaries of all layers; one object a worker."""

    name = NAME

    def __init__(self, policy: Policy, selection: SelectPages, context: WorkerContext) -> None:
        self.selection, self.scorer, self.context = selection, selection.scorer, context
        shapes = {(spec.num_kv_heads, spec.head_size, spec.dtype) for spec in context.specs}
        if len(shapes) > 1:
            raise ValueError(
                f"policy {policy.name!r} keeps summaries of one shape next to the pages, and the "
                "layers of this model have different KV heads: choose a policy without `attend`"
            )
        self._kv_heads, head_size, dtype = shapes.pop()
        width = self.scorer.rows * head_size
        if context.device.type == "cpu" and width > MAX_HEAD_SIZE:
            raise ValueError(
                f"policy {policy.name!r} keeps {width} numbers of a page and KV head of {head_size}"
                f", and the CPU's kernels multiply by {MAX_HEAD_SIZE} at most: choose a policy "
                "without `attend`"
            )
        self.summaries = Summaries(self.scorer, self._kv_heads, head_size, dtype)
        self._bounds = Bounds(
            context.block_size,
            selection.sink_pages(context.block_size),
            selection.recent_pages(context.block_size),
            selection.min_context,
        )
        self._chooser = PageChooser(selection, self._bounds, self.summaries)
        layers = [spec.layer_idx for spec in context.specs]
        self._layers = slice(layers[0], layers[-1] + 1)
        # Of the current step; None in steps without requests.
        self._step: Step | None = None
        self._plan: StepReadsPlan | None = None
        self._filled: Filling | None = None
        self._choosing: Choosing | None = None
        self._is_prepared = False  # whether the two above are those of the step
        # Where graphs of whole decode steps are captured; and whether the step has its rows there.
        self._decode_rows: DecodeRows | None = None
        self._decodes = False

    # Memory ---------------------------------------------------------------------------------------

    def bytes_per_block(self) -> int:
        return self.selection.block_extras(self.context.specs[0]).num_bytes

    def bytes_of_buffers(self) -> int:
        """Return the bytes of scores of a part of the rows, and of lists of pages of all rows.

        A step has a row for each request and its drafts, and for each token that it computes again
        (`Attend.max_recomputed`). The host keeps numbers of pages beside their blocks, and scores
        of KV heads; a step with rows that read everything has a second table.
        """
        config, on_host = self.context.config, self.context.device.type == "cpu"
        requests = config.scheduler_config.max_num_seqs
        rows = requests * (1 + config.num_speculative_tokens) + self.selection.max_recomputed
        rows = min(rows, config.scheduler_config.max_num_batched_tokens)
        pages = -(-config.model_config.max_model_len // self._bounds.block_size) + TILE
        scores = min(rows, ROWS_AT_ONCE) * (self._kv_heads if on_host else self._num_heads())
        lists = (3 if on_host else 2) * rows * self._kv_heads
        if self.context.whole_graphs():  # `DecodeRows`, whose scores are all steps'
            scores = min(requests, AT_ONCE) * self._num_heads()
            lists += requests * self._kv_heads
        return 4 * pages * (scores + lists)

    def _num_heads(self) -> int:
        config = self.context.config
        found: int = config.model_config.get_num_attention_heads(config.parallel_config)
        return found

    def allocate(self, num_blocks: int) -> None:
        self.summaries.allocate(num_blocks, self.context.device)
        self._decode_rows = None
        if self.context.whole_graphs():
            config = self.context.config
            self._decode_rows = DecodeRows(
                self._layers.stop,  # all layers: such graphs have one pipeline stage
                config.scheduler_config.max_num_seqs,
                self._num_heads(),
                self._kv_heads,
                config.model_config.max_model_len,
                self._bounds.block_size,
                self.context.device,
            )

    def compile_kernels(self, inputs: AttentionInputs) -> None:
        compile_kernels(inputs, self.selection, self.summaries, self._bounds)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.summaries.copy(sources, targets)

    def block_extras(self) -> torch.Tensor:
        return self.summaries.rows

    # Every step -----------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        budgets = np.stack([self._pages_of(request, len(step.skips)) for request in step.requests])
        self._step = step
        self._plan = StepReadsPlan(step, budgets, self._bounds, self._layers)
        self._is_prepared = False
        rows = self._decode_rows
        self._decodes = rows is not None and rows.fit(step)
        if self._decodes:
            assert rows is not None
            rows.write(step, self._plan)
            flag_lists(step.failures, names_of(step), rows.lists)
            for layer in range(self._layers.start, self._layers.stop):
                self._plan.note_planned(layer)  # a replayed graph calls nothing

    def _prepare(self, step: Step, plan: StepReadsPlan, inputs: AttentionInputs) -> None:
        """Make what the step's kernels take, when the first layer that selects has its table."""
        size, device, shifted = self._bounds.block_size, self.context.device, inputs.shifted
        self._is_prepared = True
        heads, rows = (inputs.query.shape[1], self._kv_heads), self._decode_rows
        memory = None if rows is None else rows.scores
        dense = self.selection.dense_layers
        choosing = Choosing.of(
            step, plan, heads, dense, size, device, shifted=shifted, scores=memory
        )
        if choosing is not None and isinstance(choosing.selection, PageLists):
            flag_lists(step.failures, choosing.request_ids, choosing.selection)
        self._choosing, self._filled = choosing, None
        if choosing is None or not choosing.fills:
            self._filled = Filling.of(step, size, device, shifted=shifted)

    def _pages_of(self, request: WorkerRequest, num_layers: int) -> IntArray:
        """Return the pages that a request's tokens read at most: `[L]`, of all pipeline stages."""
        pages: IntArray | None = request.state.get(NAME)
        if pages is None:
            pages = request.policy.attend.pages(
                request.initial.prompt_len, num_layers, self._bounds.block_size
            )
            request.state[NAME] = pages
        return pages

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        rows = self._decode_rows
        if rows is not None and self._is_decoding(inputs):
            if inputs.layer < self.selection.dense_layers:
                return inputs
            self._chooser.decode(inputs, self._step, rows)
            return rows.attended(inputs)
        if self._step is None or self._plan is None:
            return inputs
        if inputs.layer < self.selection.dense_layers:
            self._plan.note_dense(inputs.layer)
            return inputs
        if not self._is_prepared:
            self._prepare(self._step, self._plan, inputs)
        if self._filled is not None:
            self.summaries.add_filled(inputs, self._filled)
        if self._choosing is None:
            self._plan.note_dense(inputs.layer)
            return inputs
        return self._select(inputs, self._step, self._plan, self._choosing)

    def _is_decoding(self, inputs: AttentionInputs) -> bool:
        """Return whether the step is one that graphs are made of: being captured, or decoding."""
        return self._decodes if self._step is not None else inputs.batch.max_query_len == 1

    def _select(
        self, inputs: AttentionInputs, step: Step, plan: StepReadsPlan, choosing: Choosing
    ) -> AttentionInputs:
        layer, batch, size = inputs.layer, inputs.batch, self._bounds.block_size
        requests = self._chooser.choose(inputs, step, choosing)
        if isinstance(choosing.selection, PageLists):
            plan.note_planned(layer)
        else:
            plan.note(layer, choosing.selection.counts.numpy())
        table, seq_lens, skips = choosing.tables(inputs)
        # Kernels of devices would read the largest numbers back.
        most = (choosing.max_query_len, choosing.max_pages * size)
        return replace(
            inputs,
            batch=replace(
                batch,
                block_table=table,
                query_start_loc=choosing.starts,
                seq_lens=seq_lens,
                skips=skips,
                max_query_len=most[0] if inputs.shifted else None,
                max_seq_len=most[1] if inputs.shifted else None,
            ),
            head_requests=requests,
        )

    def end_step(self, step: Step) -> StepReads | None:
        """Return what tokens behind prompts read; PlanMismatchError: it was not planned so."""
        begun, plan = self._step, self._plan
        self._step = self._plan = self._choosing = self._filled = None
        self._decodes = False
        if begun is None or plan is None or not len(plan.requests):
            return None
        names = [request.request_id for request in begun.requests]
        failed = np.array([name in begun.failures.of for name in names], bool)
        plan.check(failed, names)
        if self.trace is not None:
            own = np.zeros_like(plan.read)
            own[plan.layers] = 1
            self.trace.add_reads(names, plan.requests, plan.read * own, plan.visible * own)

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
        if batch.call.layer >= self.selection.dense_layers:
            self.summaries.add_survivors(batch, self._bounds.block_size)


def compile_kernels(
    inputs: AttentionInputs, selection: SelectPages, summaries: Summaries, bounds: Bounds
) -> None:
    """Launch what a step may launch, on made-up `inputs` of `max_seq_len` tokens in block 0."""
    batch, ops, scorer = inputs.batch, inputs.ops, selection.scorer
    size, heads, device = bounds.block_size, inputs.key_cache.shape[1], inputs.query.device
    assert batch.max_seq_len is not None, "the warm-up says how long the table is"
    most = padded(-(-batch.max_seq_len // size), TILE)
    length = min(batch.max_seq_len, batch.block_table.shape[1] * size)
    zero, one = (torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, 1))
    own, pool = device_page_ops(ops), summaries.multiplied()
    if scorer.summary_kind is not None:
        written = (summaries.rows, inputs.key_cache, batch.block_table, zero, one, zero)
        own.summarise_pages(*written, kind=scorer.summary_kind, max_pages=1)
    rows = PageBatch(
        inputs.query[:1],
        batch.block_table,
        *(zero, one * (length - 1), zero),
        size,
        max_pages=most + 1,
        key_scale=inputs.key_scale,
    )
    chosen = PageLists.zeros(1, heads, most, device)
    for keys in (None, inputs.key_cache):  # decode steps summarise what they fill
        own.choose_pages(
            rows,
            inputs.softmax,
            pool,
            one * min(most, bounds.sinks + bounds.recent + 1),
            torch.empty(1, inputs.query.shape[1], most, device=device),
            chosen,
            kind=scorer.score_kind,
            combine=selection.combine,
            sinks=bounds.sinks,
            recent=bounds.recent,
            key_cache=keys,
        )
    out = torch.empty_like(inputs.query[:1])
    for queries in (1, 2):  # with two there are kernels of prompts, too
        for longest in (batch.max_seq_len, most * size):
            read = replace(
                batch,
                query=inputs.query[:1],
                block_table=chosen.block_table,
                seq_lens=chosen.seq_lens,
                skips=chosen.skips,
                max_query_len=queries,
                max_seq_len=longest,
            )
            ops.paged_attention(out, read, inputs.softmax)
