# SPDX-License-Identifier: Apache-2.0
"""Block tables and lengths of each layer for vLLM's own attention kernels.

A kernel without `skips` (FlashAttention, vLLM's Triton attention) sees an evicted layer as a
shorter sequence whose table starts later. `attention/shifted_tables.py` calls both functions once a
step, for all layers. The results go to tensors that the caller keeps: their addresses do not
change, so captured CUDA graphs may read them. Nothing is read back to the host. Each function has a
PyTorch twin, its oracle.

Numbers that change from step to step are not specialised on, so no step waits for a compiler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_columns"])
def shift_tables_kernel(
    tables,
    skips,
    num_columns,
    stride_layer,
    stride_row,
    stride_skips_layer,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Shift row `pid 0` of layer `pid 1` to the left, in place.

    No two programs touch the same row, so only the order inside a program matters. The tiles run
    from left to right and entries only move to the left, so what a tile stores lies before all that
    a later tile loads. Inside a tile the barrier lets every load finish before the first store.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    shift = tl.load(skips + layer * stride_skips_layer + row) // BLOCK_SIZE
    if shift == 0:
        return
    entries = tables + layer * stride_layer + row * stride_row
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        moved = tl.load(entries + columns + shift, mask=columns + shift < num_columns, other=0)
        tl.debug_barrier()
        tl.store(entries + columns, moved, mask=columns < num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def effective_lens_kernel(
    dst,
    seq_lens,
    skips,
    num_rows,
    stride_dst_layer,
    stride_skips_layer,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the lengths of the rows of tile `pid 0` in layer `pid 1`."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    mask = rows < num_rows
    skip = tl.load(skips + layer * stride_skips_layer + rows, mask=mask, other=0)
    length = tl.load(seq_lens + rows, mask=mask, other=0) - skip // BLOCK_SIZE * BLOCK_SIZE
    tl.store(dst + layer * stride_dst_layer + rows, tl.maximum(length, 0), mask=mask)


def shift_block_tables_(
    tables: torch.Tensor, skips: torch.Tensor, block_size: int, num_columns: int
) -> None:
    """Shift the skipped blocks out of every row, in place and in one launch.

    The first `num_columns` entries of a row move `skips[l, r] // block_size` entries to the left,
    and zeros (the null block) follow them. Rows that skip no whole block are not touched, nor are
    the entries behind `num_columns`. With zero layers or requests nothing is launched.

    Args:
        tables: `[L, >= R, M]` int32, written.
        skips: `[L, R]` int32, tokens.
        block_size: tokens of a block.
        num_columns: number of entries that the longest row uses, at most M. The host knows it, so
            that short batches do not move the width of the longest possible request.

    Raises:
        ValueError: the shapes do not fit together.
    """
    _check_rows("tables", tables, skips, dims=skips.dim() + 1)
    if skips.dim() != 2 or tables.shape[0] != skips.shape[0]:
        raise ValueError(
            f"tables {tuple(tables.shape)} and skips {tuple(skips.shape)} do not fit: both need "
            "the same number of layers in front"
        )
    if not 0 <= num_columns <= tables.shape[2]:
        raise ValueError(
            f"num_columns is {num_columns}, the tables have {tables.shape[2]}: it must be between "
            "0 and that"
        )
    num_layers, num_rows = skips.shape
    if num_rows == 0 or num_layers == 0:
        return
    shift_tables_kernel[(num_rows, num_layers)](
        tables,
        skips,
        num_columns,
        tables.stride(0),
        tables.stride(1),
        skips.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=min(1024, max(16, triton.next_power_of_2(tables.shape[2]))),
        num_warps=4,
    )


def effective_lens(
    dst: torch.Tensor, seq_lens: torch.Tensor, skips: torch.Tensor, block_size: int = 1
) -> None:
    """Write `dst[r] = max(0, seq_lens[r] - skip)`, with the skip rounded down to a block.

    With the `block_size` of `shift_block_tables_` the lengths fit its tables; if a skip is not a
    multiple of it, they include the skipped tokens at the front of the first block. With 1 they
    count the visible tokens. Requests of padding, with length 0, stay 0 whatever their skip.

    Args:
        dst: `[>= R]` or `[L, >= R]` int32; entries `0 .. R - 1` are written.
        seq_lens: `[>= R]` int32.
        skips: `[R]` or `[L, R]` int32.
        block_size: tokens to round skips down to.

    Raises:
        ValueError: the shapes do not fit together.
    """
    _check_rows("dst", dst, skips, dims=skips.dim())
    if skips.dim() == 1:
        dst, skips = dst[None], skips[None]
    num_layers, num_rows = skips.shape
    if num_rows == 0 or num_layers == 0:
        return
    if dst.shape[0] != num_layers or seq_lens.dim() != 1 or seq_lens.shape[0] < num_rows:
        raise ValueError(
            f"dst {tuple(dst.shape)} and seq_lens {tuple(seq_lens.shape)} do not fit skips "
            f"{tuple(skips.shape)}: dst needs its layers, both at least its rows"
        )
    block = 256
    effective_lens_kernel[(triton.cdiv(num_rows, block), num_layers)](
        dst,
        seq_lens,
        skips,
        num_rows,
        dst.stride(0),
        skips.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )


def _check_rows(name: str, tensor: torch.Tensor, skips: torch.Tensor, dims: int) -> None:
    row_dim = skips.dim() - 1
    if skips.dim() not in (1, 2) or tensor.dim() != dims:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} and skips {tuple(skips.shape)} do not fit: skips is [R] "
            f"or [layers, R], {name} then has {dims} dimensions"
        )
    if tensor.shape[row_dim] < skips.shape[-1]:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} has fewer than the {skips.shape[-1]} rows of skips"
        )
    if tensor.stride(-1) != 1 or skips.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} and skips must have stride 1")
