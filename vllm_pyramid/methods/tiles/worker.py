# SPDX-License-Identifier: Apache-2.0
"""A worker's sparse prefill: which tiles of a step's prompts are computed, and their attention.

Shape legend: R requests of the step, T its tokens, S tiles of queries of one request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_pyramid.methods.tiles.attention import attend_tiles, choose_tiles
from vllm_pyramid.methods.tiles.reads import NAME, StepTiles
from vllm_pyramid.plan.tiles import TILE
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.hooks import LayerHooks, StepHooks, WorkerContext
from vllm_pyramid.step.step import Step

if TYPE_CHECKING:
    from vllm_pyramid.methods.tiles import AntidiagonalTiles


@dataclass
class _SparseRows:
    """The tiles of a request in a step.

    Attributes:
        row: of the request in the batch. begin, end: its queries in them, rows of the step.
        first, last: numbers of the tiles of queries; `last` is behind the last one.
        read: pairs of tiles computed so far in this step. visible: those of full attention.
    """

    row: int
    begin: int
    end: int
    first: int
    last: int
    read: int = 0
    visible: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of tiles that one KV head sees."""
        return sum(range(self.first + 1, self.last + 1))


class TileAttention(StepHooks, LayerHooks):
    """Attends for the prompts of a step that are computed sparsely; one object a worker."""

    name = NAME

    def __init__(self, tiles: AntidiagonalTiles, context: WorkerContext) -> None:
        self._tiles, self._block_size = tiles, context.block_size
        self._rows: list[_SparseRows] = []

    def begin_step(self, step: Step) -> None:
        """Find the step's tiles of queries; RuntimeError: a chunk is not made of whole tiles."""
        self._rows = []
        inside = np.flatnonzero(step.computed < step.prompt_lens).tolist()
        if not inside:
            return
        ends = step.scheduled.cumsum().tolist()
        for row in inside:
            request, computed = step.requests[row], int(step.computed[row])
            scheduled = int(step.scheduled[row])
            sparse = request.policy.prefill.sparse_tokens(request.initial.prompt_len)
            if computed >= sparse:
                continue
            end = min(computed + scheduled, sparse)
            if computed % TILE or end % TILE:
                raise RuntimeError(
                    f"request {request.request_id}: a chunk of the tokens {computed} to "
                    f"{computed + scheduled} is not one of whole tiles; report this"
                )
            begin = ends[row] - scheduled
            tiles = (computed // TILE, end // TILE)
            self._rows.append(_SparseRows(row, begin, begin + end - computed, *tiles))

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        """Attend to chosen tiles with the tiles of queries, and to everything with the others."""
        if not self._rows:
            return False
        heads = inputs.key_cache.shape[1]
        for rows in self._rows:
            rows.visible += rows.pairs * heads
        if inputs.layer < self._tiles.dense_layers:
            for rows in self._rows:
                rows.read += rows.pairs * heads
            return False
        batch = inputs.batch
        done = 0  # requests whose queries have been attended to
        for rows in self._rows:
            self._attend_sparse(inputs, out, rows)
            _attend_dense(inputs, out, done, rows.row)
            _attend_rest(inputs, out, rows)
            done = rows.row + 1
        _attend_dense(inputs, out, done, len(batch.query_start_loc) - 1)
        return True

    def _attend_sparse(self, inputs: AttentionInputs, out: torch.Tensor, rows: _SparseRows) -> None:
        batch, part = inputs.batch, slice(rows.begin, rows.end)
        blocks = batch.block_table[rows.row, : rows.last * TILE // self._block_size]
        query = batch.query[part]
        scale = inputs.softmax.scale * batch.key_scale
        taken = choose_tiles(query, batch.key_cache, blocks, scale, self._tiles.top_p)
        rows.read += int(taken.sum())
        own = replace(batch, query=query)
        attend_tiles(inputs.ops, out[part], own, inputs.softmax, blocks, taken)

    def end_step(self, step: Step) -> StepTiles | None:
        """Return what the tiles of queries read."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        names = [step.requests[one.row].request_id for one in rows]
        return StepTiles(names, [one.read for one in rows], [one.visible for one in rows])


def _attend_rest(inputs: AttentionInputs, out: torch.Tensor, rows: _SparseRows) -> None:
    """Attend to everything with the queries of a request behind its tiles."""
    starts = inputs.batch.query_start_loc
    if rows.end < int(starts[rows.row + 1]):
        starts = torch.tensor([rows.end, int(starts[rows.row + 1])], dtype=torch.int32)
        _attend_to_all(inputs, out, starts, slice(rows.row, rows.row + 1))


def _attend_dense(inputs: AttentionInputs, out: torch.Tensor, first: int, last: int) -> None:
    """Attend to everything with the requests `first .. last - 1`."""
    if first < last:
        starts = inputs.batch.query_start_loc[first : last + 1]
        _attend_to_all(inputs, out, starts, slice(first, last))


def _attend_to_all(
    inputs: AttentionInputs, out: torch.Tensor, starts: torch.Tensor, requests: slice
) -> None:
    """Attend with requests of the batch whose queries are the rows from `starts` on."""
    batch, lse = inputs.batch, inputs.log_sum_exp
    rows = slice(int(starts[0]), int(starts[-1]))
    inputs.ops.paged_attention(
        out[rows],
        replace(
            batch,
            query=batch.query[rows],
            block_table=batch.block_table[requests],
            query_start_loc=starts - starts[0],
            seq_lens=batch.seq_lens[requests],
            skips=batch.skips[requests],
        ),
        inputs.softmax,
        log_sum_exp=None if lse is None else lse[rows],
    )
