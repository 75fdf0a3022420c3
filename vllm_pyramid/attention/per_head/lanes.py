# SPDX-License-Identifier: Apache-2.0
"""KV heads with block tables of their own: requests of one KV head each, to the kernels.

A step of R requests in a layer of G KV heads becomes one of R * G requests of a single head, in the
rows `r * G + g` (lanes). Attention, selection and compaction then need no kernels of their own.

    table of a request    [ head 0 .. head G - 1 ][ head 0 .. head G - 1 ] ...    as vLLM fills it
    tables of its lanes   [ head 0 ][ head 0 ] ...   to   [ head G - 1 ][ head G - 1 ] ...

Shape legend: R requests, G KV heads, T tokens of the step, H query heads, N tokens of a lane's
block, M entries of a request's table, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.step import Step


@dataclass(frozen=True)
class LaneStep:
    """What all layers of a step share. Made of vLLM's tensors, which are not written to in a step.

    Attributes:
        seq_lens: `[R * G]` int32. query_starts: `[R * G + 1]` int32.
        order: `[T * G]` int64, the rows `token * G + head` in the order of the lanes; None: they
            are in that order, since every request has one token.
        requests: `[T]` int64, the request of each token.
        entries: `[T]` int64, the entry of head 0 in the request's table for each token.
        places: `[T]` int64, the place of each token in its block.
        num_blocks: blocks of the longest lane.
    """

    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    order: torch.Tensor | None
    requests: torch.Tensor
    entries: torch.Tensor
    places: torch.Tensor
    num_blocks: int


class HeadLanes:
    """The KV heads of all layers, each with a block table, on the CPU; elsewhere see `LaneTables`.

    Args:
        count: G. block_size: N.
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count, self.block_size = count, block_size
        self._step: Step | None = None
        self._lanes: LaneStep | None = None

    def of_step(
        self, step: Step, query_starts: torch.Tensor, seq_lens: torch.Tensor, longest: int
    ) -> LaneStep:
        """Return the lanes of a step, made once; `longest` bounds `seq_lens`, `[R]`."""
        if self._step is step and self._lanes is not None:
            return self._lanes
        count, lens = self.count, query_starts.diff().long()
        requests = torch.arange(len(lens)).repeat_interleave(lens)
        tokens = torch.arange(len(requests))
        # Positions of a request's tokens in the step end with its last one.
        positions = tokens - query_starts[1:].long()[requests] + seq_lens.long()[requests]
        starts = query_starts.new_zeros(len(lens) * count + 1)
        starts[1:] = lens.repeat_interleave(count).cumsum(0)
        order = None
        if bool((lens != 1).any()):
            # Stable by request and head, so tokens of a lane stay in order.
            lanes = requests[:, None] * count + torch.arange(count)
            order = lanes.flatten().argsort(stable=True)
        made = LaneStep(
            seq_lens.repeat_interleave(count),
            starts,
            order,
            requests,
            positions // self.block_size * count,
            positions % self.block_size,
            -(-longest // self.block_size),
        )
        self._step, self._lanes = step, made
        return made

    def tables(self, step: LaneStep, table: torch.Tensor) -> torch.Tensor:
        """Return the lanes' tables, `[R * G, num_blocks]` int32, of a layer's `[>= R, M]`."""
        requests = len(step.seq_lens) // self.count
        used = table[:requests, : step.num_blocks * self.count]
        of_lanes = used.unflatten(1, (-1, self.count)).transpose(1, 2).contiguous()
        return of_lanes.flatten(0, 1)

    def slots(self, step: LaneStep, table: torch.Tensor) -> torch.Tensor:
        """Return the slots of the step's tokens and heads in a layer, `[T * G]` int64."""
        entries = step.entries[:, None] + torch.arange(self.count)
        blocks = table[step.requests[:, None], entries].long()
        return (blocks * self.block_size + step.places[:, None]).flatten()

    def as_one_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[T, heads, D]` as `[T * G, heads / G, D]`, a view where memory allows."""
        return rows.unflatten(1, (self.count, -1)).flatten(0, 1)

    def attend(self, ops: Ops, batch: AttentionBatch, softmax: Softmax, out: torch.Tensor) -> None:
        """Attend in all lanes of a layer; the batch has `[T, H, D]` queries, and lanes' tables."""
        assert self._lanes is not None, "the layer's metadata are those of a step"
        query, order = self.as_one_head(batch.query), self._lanes.order
        rows = out.view(query.shape)
        if order is None:
            ops.paged_attention(rows, replace(batch, query=query), softmax)
            return
        query, found = query[order], torch.empty_like(rows)
        ops.paged_attention(found, replace(batch, query=query), softmax)
        rows.index_copy_(0, order, found)

    def split(self, inputs: AttentionInputs) -> Iterator[AttentionInputs]:
        """Return what each lane of a layer evicts by: inputs of a layer with one KV head."""
        batch, count = inputs.batch, self.count
        group = batch.query.shape[1] // count
        tables = batch.block_table.unflatten(0, (-1, count))
        lens, skips = (rows.unflatten(0, (-1, count)) for rows in (batch.seq_lens, batch.skips))
        offsets = inputs.offsets
        if offsets is not None:
            offsets = offsets.unflatten(0, (-1, count))
        starts = batch.query_start_loc[::count] // count
        for lane in range(count):
            heads = slice(lane * group, (lane + 1) * group)
            yield replace(
                inputs,
                layer=inputs.layer * count + lane,
                offsets=None if offsets is None else offsets[:, lane].contiguous(),
                log_sum_exp=None,  # of the requests of one head, whose order is another
                batch=replace(
                    batch,
                    query=batch.query[:, heads],
                    block_table=tables[:, lane],
                    query_start_loc=starts,
                    seq_lens=lens[:, lane].contiguous(),
                    skips=skips[:, lane].contiguous(),
                ),
            )
