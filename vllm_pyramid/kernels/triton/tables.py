# SPDX-License-Identifier: Apache-2.0
"""Block tables and lengths of each layer for vLLM's own attention kernels.

A kernel without `skips` sees an evicted layer as a shorter sequence whose table starts later
(`attention/shifted_tables.py`). Captured CUDA graphs may read what is written here. Nothing is read
back to the host. Numbers that change from step to step are not specialised on, so no step waits for
a compiler. Shape legend as in `table_records.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_pyramid.kernels.table_records import FIELDS, StepRows, TableGroups


@triton.jit
def _copy_entries(
    source, target, first, count, STEP: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy `count` entries, each STEP behind the one before, from entry `first` of a source on.

    In place, entries only move to the left and tiles run from left to right, so what a tile stores
    lies before all that a later tile loads. Inside a tile the barrier lets every load finish before
    the first store. No two programs touch the same row.
    """
    for start in range(0, count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < count
        moved = tl.load(source + (first + columns) * STEP, mask=mask, other=0)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(target + columns, moved, mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "num_evicting", "stride_blocks"])
def gather_tables_kernel(
    groups,
    slots,
    num_blocks,
    seq_lens,
    skips,
    row_lens,
    row_skips,
    num_reqs,
    num_evicting,
    stride_blocks,
    stride_skips,
    stride_rows,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
    BY_SLOT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write table, length and skip of row `pid 0` (a lane of a request) in group `pid 1`."""
    lane = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    row = lane // LANES
    head = lane % LANES
    numbers = groups + group * FIELDS
    source = tl.cast(tl.load(numbers), tl.pointer_type(tl.int32))
    source_stride = tl.load(numbers + 1)
    target = tl.cast(tl.load(numbers + 2), tl.pointer_type(tl.int32))
    target_stride = tl.load(numbers + 3)
    is_request = row < num_reqs
    slot = row
    if BY_SLOT:
        slot = tl.load(slots + row, mask=is_request, other=0)
    source += slot * source_stride
    if group < num_evicting:
        block_size = tl.load(numbers + 4).to(tl.int32)
        length = tl.load(seq_lens + row)
        skip = tl.load(
            skips + slot * stride_skips + group * LANES + head, mask=is_request, other=0
        ).to(tl.int32)
        tl.store(row_lens + group * stride_rows + lane, tl.maximum(length - skip, 0))
        tl.store(row_skips + group * stride_rows + lane, skip)
        first = skip // block_size
        held = tl.minimum((length + block_size - 1) // block_size, source_stride // LANES) - first
        if BY_SLOT:
            held = tl.where(is_request, held, 0)
        if IN_PLACE:
            held = tl.where(first > 0, held, 0)
        _copy_entries(
            source + head, target + lane * target_stride, first, held, LANES, IN_PLACE, BLOCK
        )
    elif head == 0:
        # As vLLM's own kernel: all blocks that a request holds, and null blocks in padding.
        target += row * target_stride
        if is_request:
            place = tl.load(numbers + 5)
            held = tl.load(num_blocks + place * stride_blocks + slot)
            _copy_entries(source, target, 0, held, 1, False, BLOCK)
        else:
            for start in range(0, target_stride, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                nothing = tl.zeros((BLOCK,), tl.int32)
                tl.store(target + columns, nothing, mask=columns < target_stride)


def gather_tables(
    groups: TableGroups,
    rows: StepRows,
    skips: torch.Tensor,
    row_lens: torch.Tensor,
    row_skips: torch.Tensor,
) -> None:
    """Write the tables of a step without the blocks that rows skipped, their lengths and skips.

        target[l][r * G + g, c] = source[l][slot(r), (c + skip // block_size) * G + g]
        row_lens[l, r * G + g] = max(0, seq_lens[r] - skip)     skip = skips[slot(r), l * G + g]

    Of a row only the entries are written that it keeps: those of its `seq_lens[r]` tokens behind
    the skip. In place, rows that skip no whole block are not touched. Padding skips nothing; from
    sources `by_slot` it is given no blocks. Groups that evict nothing get all blocks of their
    requests, and zeros in the whole of their padding. With zero rows or groups nothing is launched.

    Args:
        skips: `[requests, L * G]` int64, tokens.
        row_lens, row_skips: `[L, >= R * G]` int32, written; with the same strides.

    Raises:
        ValueError: the shapes do not fit together.
    """
    count = len(groups.sources) if rows.num_blocks is not None else groups.num_evicting
    num_rows = len(rows.seq_lens) * groups.per_layer
    _check(groups, rows, skips, row_lens, row_skips, num_rows)
    if count == 0 or num_rows == 0:
        return
    num_blocks = rows.num_blocks
    gather_tables_kernel[(num_rows, count)](
        groups.numbers,
        groups.numbers if rows.slots is None else rows.slots,
        rows.seq_lens if num_blocks is None else num_blocks,
        rows.seq_lens,
        skips,
        row_lens,
        row_skips,
        rows.num_reqs,
        groups.num_evicting,
        0 if num_blocks is None else num_blocks.stride(0),
        skips.stride(0),
        row_lens.stride(0),
        FIELDS=FIELDS,
        LANES=groups.per_layer,
        BY_SLOT=groups.by_slot,
        IN_PLACE=groups.in_place,
        BLOCK=min(1024, max(16, triton.next_power_of_2(groups.targets[0].shape[1]))),
        num_warps=4,
    )


def _check(
    groups: TableGroups,
    rows: StepRows,
    skips: torch.Tensor,
    row_lens: torch.Tensor,
    row_skips: torch.Tensor,
    num_rows: int,
) -> None:
    needed = groups.num_evicting * groups.per_layer
    if skips.shape[1] != needed or skips.stride(1) != 1:
        raise ValueError(
            f"skips {tuple(skips.shape)} are not those of {needed} tables side by side"
        )
    if row_lens.stride() != row_skips.stride() or row_lens.stride(1) != 1:
        raise ValueError(
            f"lengths and skips are written together and have the strides {row_lens.stride()} and "
            f"{row_skips.stride()}: they must be alike, and end with 1"
        )
    if row_lens.shape[1] < num_rows or any(
        len(target) < num_rows for target in groups.targets[: groups.num_evicting]
    ):
        raise ValueError(f"tables or lengths have fewer than the step's {num_rows} rows")
    if not 0 <= rows.num_reqs <= len(rows.seq_lens):
        raise ValueError(f"{rows.num_reqs} of {len(rows.seq_lens)} rows cannot be requests")
    if groups.by_slot and rows.num_reqs and rows.slots is None:
        raise ValueError(f"the slots of {rows.num_reqs} requests are missing")
