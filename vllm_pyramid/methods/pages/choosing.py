# SPDX-License-Identifier: Apache-2.0
"""What the kernels take of a step's rows that choose pages, made once a step for all layers.

Where tables are shifted (`attention/shifted_tables.py`), positions count from the first token that
a layer's table has, and nothing in it is skipped. On such devices sizes are multiples of 16, since
Triton compiles other kernels for other strides.

Shape legend: L layers, R requests of the step, S rows of attention, C rows that choose, H query
heads, G KV heads, W pages of a selected table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists, PageSelection
from vllm_pyramid.methods.pages.step_rows import FullPages, RowsOfStep, StepReadsPlan
from vllm_pyramid.plan import IntArray
from vllm_pyramid.step.attention_inputs import AttentionInputs, HeadRequests
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload

TILE = 16  # of sizes where tables are shifted
# Rows that are scored at once: scores of all rows of a large batch would take more memory.
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Filling:
    """The pages that a step fills, as each layer's table counts them.

    Attributes:
        pages: counted from the first token of each request.
        starts, ends: `[L, R]` int32, of `FullPages`, on the device.
    """

    pages: FullPages
    starts: torch.Tensor
    ends: torch.Tensor
    max_pages: int

    @classmethod
    def of(
        cls, step: Step, block_size: int, device: torch.device, *, shifted: bool
    ) -> Filling | None:
        pages = FullPages.of(step, block_size)
        if pages is None:
            return None
        before = step.skips if shifted else np.zeros_like(step.skips)
        most = int(np.bincount(pages.requests).max())
        starts, ends = (upload(edge - before, device) for edge in (pages.starts, pages.ends))
        return cls(pages, starts, ends, most)


@dataclass(frozen=True)
class Choosing:
    """The rows of a step that choose pages, and where scores and choices go.

    Attributes:
        rows: all rows of the step's attention. starts: `[S + 1]` int32, where their queries begin.
        head_starts: `[S * G + 1]` int32, where those of each KV head begin; None: some row has
            several queries or reads everything, or tables are not shifted.
        tokens: `[C]` int64, the tokens of the rows that choose; None: all of the step's.
        requests: `[C]` int32. request_ids: their names.
        seq_lens, skips: `[L, S]` int32, of all rows, in each layer's table.
        positions, chosen_skips, budgets: `[L, C]` int32, of the rows that choose; budgets in pages.
        indices: `[S]` int64, the rows that choose, then those that read everything; None: all rows
            choose. whole_requests: `[S - C]` int64.
        max_query_len: the most queries of a row. max_pages: the most pages of a table.
        visible: the largest number of pages that a row sees, for each layer, padded.
        scores: `[<= ROWS_AT_ONCE, G, pages]` float32 of the current layer; `[..., H, ...]` where
            tables are shifted.
        selection: of the current layer, until the next one. Lists where tables are shifted; their
            flags are the step's.
        fills: whether the choice summarises what the rows fill: tables are shifted, and each
            request has one row. Others may choose among the pages that the step fills.
    """

    rows: RowsOfStep
    starts: torch.Tensor
    head_starts: torch.Tensor | None
    tokens: torch.Tensor | None
    requests: torch.Tensor
    request_ids: tuple[str, ...]
    seq_lens: torch.Tensor
    skips: torch.Tensor
    positions: torch.Tensor
    chosen_skips: torch.Tensor
    budgets: torch.Tensor
    indices: torch.Tensor | None
    whole_requests: torch.Tensor
    max_query_len: int
    max_pages: int
    visible: list[int]
    scores: torch.Tensor
    selection: PageSelection | PageLists
    fills: bool

    @classmethod
    def of(
        cls,
        step: Step,
        plan: StepReadsPlan,
        heads: tuple[int, int],
        dense_layers: int,
        block_size: int,
        device: torch.device,
        *,
        shifted: bool,
        scores: torch.Tensor | None = None,
    ) -> Choosing | None:
        """Return the rows of a step, in layers above `dense_layers`; None if no token chooses.

        `heads` are H and G; `scores`: memory for them that stays; None: allocate it.
        """
        if not plan.chooses.any():
            return None
        rows = RowsOfStep.of(step, plan)
        chosen, tile = rows.chosen, TILE if shifted else 1
        skips = step.skips[:, rows.requests]
        seq_lens = rows.seq_lens - skips if shifted else np.tile(rows.seq_lens, (len(skips), 1))
        skips = np.zeros_like(skips) if shifted else skips
        tokens = indices = head_starts = None
        (num_heads, kv_heads), count = heads, len(chosen)
        max_pages, max_query_len = 0, 1
        if len(rows.whole):
            tokens = upload(rows.starts[chosen].astype(np.int64), device)
            indices = upload(np.concatenate([chosen, rows.whole]), device)
            max_pages = -(-int(seq_lens[:, rows.whole].max()) // block_size)
            max_query_len = int(np.diff(rows.starts).max())
        elif shifted:
            head_starts = torch.arange(count * kv_heads + 1, dtype=torch.int32, device=device)
        planned = plan.planned[:, plan.chooses].astype(np.int32, order="C")
        width = padded(int(planned[dense_layers:].max()), tile)
        visible = plan.visible[:, plan.chooses].max(axis=1)
        visible = [padded(most - 1, tile) + 1 for most in visible.tolist()]
        if scores is None:
            shape = min(count, ROWS_AT_ONCE), num_heads if shifted else kv_heads
            scores = torch.empty(*shape, max(visible[dense_layers:]) - 1, device=device)
        memory = (PageLists.zeros if shifted else PageSelection.empty)(
            count, kv_heads, width, device
        )

        def put(array: IntArray) -> torch.Tensor:
            return upload(np.ascontiguousarray(array), device)

        return cls(
            rows,
            put(rows.starts),
            head_starts,
            tokens,
            put(rows.requests[chosen]),
            tuple(step.requests[row].request_id for row in rows.requests[chosen].tolist()),
            put(seq_lens),
            put(skips),
            put(seq_lens[:, chosen] - 1),
            put(skips[:, chosen]),
            put(planned),
            indices,
            put(rows.requests[rows.whole].astype(np.int64)),
            max_query_len,
            max(width, padded(max_pages, tile)),
            visible,
            scores,
            memory,
            head_starts is not None and bool((step.scheduled == 1).all()),
        )

    def queries_of(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries of the rows that choose, `[C, H, D]`, of the step's, `[T, H, D]`."""
        if self.tokens is None:
            return query[: len(self.requests)]
        return query.index_select(0, self.tokens)

    def batch(
        self, inputs: AttentionInputs, query: torch.Tensor, block_size: int, part: slice
    ) -> PageBatch:
        """Return a part of a layer's rows, of whose queries `query`, `[C, H, D]`, has all."""
        return PageBatch(
            query[part],
            inputs.block_table,
            self.requests[part],
            self.positions[inputs.layer][part],
            self.chosen_skips[inputs.layer][part],
            block_size,
            max_pages=self.visible[inputs.layer],
            key_scale=inputs.key_scale,
        )

    def tables(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tables `[S, G, W]`, lengths and skips `[S]` int32 of all rows."""
        selected = self.selection
        if self.indices is None:
            return selected.block_table, selected.seq_lens, selected.skips
        chosen, whole = self.indices.split([len(self.requests), len(self.whole_requests)])
        heads, width = selected.block_table.shape[1:]
        table = selected.block_table.new_zeros((len(self.indices), heads, self.max_pages))
        table[chosen, :, :width] = selected.block_table
        entries = min(self.max_pages, inputs.block_table.shape[1])
        own = inputs.block_table[self.whole_requests, :entries]
        table[whole, :, :entries] = own[:, None].expand(-1, heads, -1)
        seq_lens, skips = self.seq_lens[inputs.layer].clone(), self.skips[inputs.layer].clone()
        seq_lens[chosen], skips[chosen] = selected.seq_lens, selected.skips
        return table, seq_lens, skips


def parts_of(rows: int, scores: torch.Tensor) -> Iterator[slice]:
    """Yield the rows that are scored at once, as many as `scores` has, one part after the other."""
    for first in range(0, rows, len(scores)):
        yield slice(first, min(first + len(scores), rows))


def head_requests(
    inputs: AttentionInputs, lists: PageLists, starts: torch.Tensor
) -> HeadRequests | None:
    """Return S rows of one query as requests of their KV heads, where lists name these."""
    if inputs.head_names is None:
        return None
    seq_lens = lists.head_lens.flatten()
    return HeadRequests(starts[: len(seq_lens) + 1], seq_lens)


def padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile
