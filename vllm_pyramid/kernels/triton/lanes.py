# SPDX-License-Identifier: Apache-2.0
"""Slots and the order of queries of lanes: KV heads as requests of one head.

R requests become R * G of one KV head each (`attention/per_head/lanes.py`); `tables.py` gathers
their tables and lengths, and its rules hold here too.

Shape legend: L layers, R requests, G KV heads, T tokens of the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_pyramid.kernels.table_records import FIELDS, StepRows, TableGroups


@triton.jit
def lane_rows_kernel(
    starts,
    order,
    query_starts,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write where the queries of request `pid 0` begin in each of its lanes, and their order."""
    row = tl.program_id(0)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    heads = tl.arange(0, HEADS_PADDED)
    tl.store(starts + row * HEADS + heads, start * HEADS + heads * length, mask=heads < HEADS)
    if row == tl.num_programs(0) - 1:
        tl.store(starts + (row + 1) * HEADS, (start + length) * HEADS)
    for first in range(0, length, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        mask = (tokens < length)[:, None] & (heads < HEADS)[None, :]
        places = start * HEADS + heads[None, :] * length + tokens[:, None]
        rows = (start + tokens)[:, None] * HEADS + heads[None, :]
        tl.store(order + places, rows.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["written", "num_reqs"])
def lane_slots_kernel(
    slots,
    groups,
    requests,
    query_starts,
    seq_lens,
    written,
    num_reqs,
    stride_slots,
    FIELDS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the slots of request `pid 0` in layer `pid 1`; the last program clears what is behind.

    Positions of a request's tokens in the step end with its last one.
    """
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    start = tl.load(query_starts + row)
    target = slots + layer * stride_slots
    if row == tl.num_programs(0) - 1:
        for first in range(start * HEADS, written, BLOCK):
            places = first + tl.arange(0, BLOCK)
            nothing = tl.full((BLOCK,), -1, tl.int64)
            tl.store(target + places, nothing, mask=places < written)
    else:
        length = tl.load(query_starts + row + 1) - start
        before = tl.load(seq_lens + row) - length
        numbers = groups + layer * FIELDS
        block_size = tl.load(numbers + 4).to(tl.int32)
        request = row.to(tl.int64)
        if BY_SLOT:
            request = tl.load(requests + row, mask=row < num_reqs, other=0)
        entries = tl.cast(tl.load(numbers), tl.pointer_type(tl.int32))
        entries += request * tl.load(numbers + 1)
        heads = tl.arange(0, HEADS_PADDED)
        for first in range(0, length, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            mask = (tokens < length)[:, None] & (heads < HEADS)[None, :]
            positions = before + tokens
            columns = (positions // block_size)[:, None] * HEADS + heads[None, :]
            blocks = tl.load(entries + columns, mask=mask, other=0).to(tl.int64)
            places = (start + tokens)[:, None] * HEADS + heads[None, :]
            found = blocks * block_size + (positions % block_size)[:, None]
            tl.store(target + places, found, mask=mask)


def lane_rows(
    starts: torch.Tensor, order: torch.Tensor, query_starts: torch.Tensor, heads: int
) -> None:
    """Write where the queries of each lane begin, and which query stands at each place.

    The queries `[T, G, ...]` are numbered `token * G + head`; `order`, `[>= T * G]` int64, lists
    them lane by lane. `starts` is `[>= R * G + 1]` int32, `query_starts` `[R + 1]`.
    """
    num_rows = len(query_starts) - 1
    if len(starts) <= num_rows * heads:
        raise ValueError(
            f"starts has {len(starts)} places, {num_rows} requests of {heads} KV heads have "
            f"{num_rows * heads + 1}"
        )
    if num_rows == 0:
        return
    lane_rows_kernel[(num_rows,)](
        starts,
        order,
        query_starts,
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        BLOCK=128,
        num_warps=4,
    )


def lane_slots(
    slots: torch.Tensor,
    groups: TableGroups,
    rows: StepRows,
    query_starts: torch.Tensor,
    written: int,
) -> None:
    """Write the slots of the step's tokens and KV heads, `token * G + head`, in each layer.

    Behind them, up to `written`, -1 is written, which writes nothing: padded tokens of a captured
    batch find it. `slots` is `[L, >= T * G]` int64, `query_starts` `[R + 1]` int32.
    """
    if written > slots.shape[1]:
        raise ValueError(f"{written} of {slots.shape[1]} slots cannot have been written")
    if len(slots) == 0:
        return
    lane_slots_kernel[(len(query_starts), len(slots))](
        slots,
        groups.numbers,
        groups.numbers if rows.slots is None else rows.slots,
        query_starts,
        rows.seq_lens,
        written,
        rows.num_reqs,
        slots.stride(0),
        FIELDS=FIELDS,
        HEADS=groups.per_layer,
        HEADS_PADDED=triton.next_power_of_2(groups.per_layer),
        BY_SLOT=groups.by_slot,
        BLOCK=128,
        num_warps=4,
    )
