# SPDX-License-Identifier: Apache-2.0
"""Block tables, lengths, slots and the order of queries of lanes: KV heads as requests of one head.

Where each KV head has a block table of its own, a table of vLLM's has an entry of each of the G
heads for every block's tokens (`attention/head_lanes.py`). FlashAttention and vLLM's Triton
attention read one table for a request, so R requests become R * G of one KV head each:

    table of a request       [ head 0 .. head G - 1 ][ head 0 .. head G - 1 ] ...    of vLLM
    table of lane r * G + g  [ head g ][ head g ] ...    from the first block that the lane holds

`attention/lane_tables.py` calls these functions once a step. The results go to tensors that the
caller keeps: their addresses do not change, so captured CUDA graphs may read them. Nothing is read
back to the host. Each function has a PyTorch twin, its oracle.

Numbers that change from step to step are not specialised on, so no step waits for a compiler.

Shape legend: L layers, R requests, G KV heads, T tokens of the step, M entries of a request's
table, W of a lane's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["num_columns"])
def gather_lanes_kernel(
    lane_tables,
    lane_lens,
    tables,
    skips,
    seq_lens,
    num_columns,
    stride_lanes_layer,
    stride_lanes_row,
    stride_layer,
    stride_row,
    stride_rows,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the table and the length of lane `pid 0` in layer `pid 1`."""
    lane = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    row = lane // HEADS
    skip = tl.load(skips + layer * stride_rows + lane)
    shift = skip // BLOCK_SIZE
    source = tables + layer * stride_layer + row * stride_row + lane % HEADS
    target = lane_tables + layer * stride_lanes_layer + lane * stride_lanes_row
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        found = tl.load(
            source + (columns + shift) * HEADS, mask=columns + shift < num_columns, other=0
        )
        tl.store(target + columns, found, mask=columns < num_columns)
    length = tl.load(seq_lens + row) - skip
    tl.store(lane_lens + layer * stride_rows + lane, tl.maximum(length, 0))


@triton.jit(do_not_specialize=["written"])
def lane_slots_kernel(
    slots,
    tables,
    query_starts,
    seq_lens,
    written,
    stride_slots,
    stride_layer,
    stride_row,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
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
        entries = tables + layer * stride_layer + row.to(tl.int64) * stride_row
        heads = tl.arange(0, HEADS_PADDED)
        for first in range(0, length, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            mask = (tokens < length)[:, None] & (heads < HEADS)[None, :]
            positions = before + tokens
            columns = (positions // BLOCK_SIZE)[:, None] * HEADS + heads[None, :]
            blocks = tl.load(entries + columns, mask=mask, other=0).to(tl.int64)
            places = (start + tokens)[:, None] * HEADS + heads[None, :]
            found = blocks * BLOCK_SIZE + (positions % BLOCK_SIZE)[:, None]
            tl.store(target + places, found, mask=mask)


def lane_rows(
    starts: torch.Tensor, order: torch.Tensor, query_starts: torch.Tensor, heads: int
) -> None:
    """Write where the queries of each lane begin, and which query stands at each place.

    The queries `[T, G, ...]` are numbered `token * G + head`; `order` lists them lane by lane. A
    step in which every request has one token has them in that order already.

    Args:
        starts: `[>= R * G + 1]` int32, written up to there.
        order: `[>= T * G]` int64, written up to there.
        query_starts: `[R + 1]` int32. heads: G.

    Raises:
        ValueError: `starts` is too short.
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


def gather_lanes(
    lane_tables: torch.Tensor,
    lane_lens: torch.Tensor,
    tables: torch.Tensor,
    skips: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    num_columns: int,
) -> None:
    """Write the tables of lanes without the blocks that they skipped, and their lengths.

        lane_tables[l, r * G + g, c] = tables[l, r, (c + skip // block_size) * G + g]
        lane_lens[l, r * G + g] = max(0, seq_lens[r] - skip)       skip = skips[l, r * G + g]

    The first `num_columns` entries of a lane are read, and zeros (the null block) stand behind
    them. Nothing is written behind `num_columns`, nor in rows of further requests.

    Args:
        lane_tables: `[L, >= R * G, W]` int32. lane_lens: `[L, >= R * G]` int32; both are written.
        tables: `[L, >= R, M]` int32, as vLLM fills them.
        skips: `[L, R * G]` int32, tokens, with the strides of `lane_lens`.
        seq_lens: `[R]` int32. block_size: tokens of a lane's block.
        num_columns: entries that the longest lane uses, which the host knows.

    Raises:
        ValueError: the shapes do not fit together.
    """
    heads = _heads_of(skips, seq_lens)
    num_layers, num_lanes = skips.shape
    width = min(lane_tables.shape[2], tables.shape[2] // heads)
    if not 0 <= num_columns <= width:
        raise ValueError(f"num_columns is {num_columns}, the tables have {width} of each KV head")
    if skips.stride() != lane_lens.stride() or skips.stride(1) != 1:
        raise ValueError(
            f"lengths and skips are written together and have the strides {lane_lens.stride()} "
            f"and {skips.stride()}: they must be alike, and end with 1"
        )
    if num_layers == 0 or num_lanes == 0:
        return
    gather_lanes_kernel[(num_lanes, num_layers)](
        lane_tables,
        lane_lens,
        tables,
        skips,
        seq_lens,
        num_columns,
        lane_tables.stride(0),
        lane_tables.stride(1),
        tables.stride(0),
        tables.stride(1),
        skips.stride(0),
        HEADS=heads,
        BLOCK_SIZE=block_size,
        BLOCK=min(1024, max(16, triton.next_power_of_2(lane_tables.shape[2]))),
        num_warps=4,
    )


def lane_slots(
    slots: torch.Tensor,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    heads: int,
    block_size: int,
    written: int,
) -> None:
    """Write the slots of the step's tokens and KV heads, `token * G + head`, in each layer.

    Behind them -1 is written, which writes nothing: padded tokens of a captured batch find it.

    Args:
        slots: `[L, >= T * G]` int64, written.
        tables: `[L, >= R, M]` int32, as vLLM fills them. query_starts: `[R + 1]` int32.
        seq_lens: `[R]` int32, with the step's tokens. heads: G.
        block_size: tokens of a lane's block.
        written: places up to which earlier steps may have left slots.

    Raises:
        ValueError: there are fewer places than were written.
    """
    if written > slots.shape[1]:
        raise ValueError(f"{written} of {slots.shape[1]} slots cannot have been written")
    if len(slots) == 0:
        return
    lane_slots_kernel[(len(query_starts), len(slots))](
        slots,
        tables,
        query_starts,
        seq_lens,
        written,
        slots.stride(0),
        tables.stride(0),
        tables.stride(1),
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        BLOCK_SIZE=block_size,
        BLOCK=128,
        num_warps=4,
    )


def _heads_of(skips: torch.Tensor, seq_lens: torch.Tensor) -> int:
    """Return the KV heads of each request."""
    num_lanes, num_rows = skips.shape[1], len(seq_lens)
    if num_rows == 0 or num_lanes % num_rows:
        raise ValueError(f"{num_lanes} lanes are not those of {num_rows} requests")
    return num_lanes // num_rows
