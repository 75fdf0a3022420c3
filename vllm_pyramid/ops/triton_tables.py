# SPDX-License-Identifier: Apache-2.0
"""Per-layer block tables and lengths for a stock paged kernel, without host synchronisation.

A kernel that knows nothing of `skips` (FlashAttention) sees an evicted layer as a shorter sequence
whose table starts later. The results go to buffers that the caller keeps: their addresses do not
change, so captured CUDA graphs may read them. Each function has a PyTorch twin, its oracle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def shift_tables_kernel(
    dst,
    src,
    skips,
    num_dst_columns,
    num_src_columns,
    stride_dst_layer,
    stride_dst_row,
    stride_src_layer,
    stride_src_row,
    stride_skips_layer,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `pid 0`, columns of tile `pid 1`, layer `pid 2`."""
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(skips + layer * stride_skips_layer + row) // BLOCK_SIZE
    entries = tl.load(
        src + layer * stride_src_layer + row * stride_src_row + columns + shift,
        mask=columns + shift < num_src_columns,
        other=0,
    )
    tl.store(
        dst + layer * stride_dst_layer + row * stride_dst_row + columns,
        entries,
        mask=columns < num_dst_columns,
    )


@triton.jit
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
    """Rows of tile `pid 0`, layer `pid 1`."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    mask = rows < num_rows
    skip = tl.load(skips + layer * stride_skips_layer + rows, mask=mask, other=0)
    length = tl.load(seq_lens + rows, mask=mask, other=0) - skip // BLOCK_SIZE * BLOCK_SIZE
    tl.store(dst + layer * stride_dst_layer + rows, tl.maximum(length, 0), mask=mask)


def gather_shifted_block_tables(
    dst: torch.Tensor, src: torch.Tensor, skips: torch.Tensor, block_size: int
) -> None:
    """Write `dst[r, j] = src[r, j + skips[r] // block_size]`, 0 past the end of `src`.

    Args:
        dst: `[>= R, M]` int32, written in rows `0 .. R - 1`; or `[L, >= R, M]` for L layers in one
            launch. Must not overlap `src`.
        src: `[>= R, M']` int32, or `[L, >= R, M']`, or `[1, >= R, M']` where the layers share it.
        skips: `[R]` int32, or `[L, R]`.

    Raises:
        ValueError: the shapes do not fit together.
    """
    _check_rows("dst", dst, skips, dims=skips.dim() + 1)
    _check_rows("src", src, skips, dims=skips.dim() + 1)
    if skips.dim() == 1:
        dst, src, skips = dst[None], src[None], skips[None]
    num_layers, num_rows = skips.shape
    if num_rows == 0 or num_layers == 0 or dst.shape[2] == 0:
        return
    if dst.shape[0] != num_layers or src.shape[0] not in (1, num_layers):
        raise ValueError(
            f"dst has {dst.shape[0]} and src {src.shape[0]} layers, skips {num_layers}; "
            "dst must have as many as skips, src as many or one"
        )
    block = min(1024, max(16, triton.next_power_of_2(dst.shape[2])))
    shift_tables_kernel[(num_rows, triton.cdiv(dst.shape[2], block), num_layers)](
        dst,
        src,
        skips,
        dst.shape[2],
        src.shape[2],
        dst.stride(0),
        dst.stride(1),
        src.stride(0) if src.shape[0] > 1 else 0,
        src.stride(1),
        skips.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )


def effective_lens(
    dst: torch.Tensor, seq_lens: torch.Tensor, skips: torch.Tensor, block_size: int = 1
) -> None:
    """Write `dst[r] = max(0, seq_lens[r] - skip)`, the skip rounded down to a block.

    With the `block_size` of `gather_shifted_block_tables` the lengths fit its tables (and where a
    skip is not aligned, include the dead rows at the front of the first block); with 1 they count
    the visible tokens. Rows of padding, length 0, stay 0 whatever their skip.

    Args:
        dst: `[>= R]` int32, written in `0 .. R - 1`, or `[L, >= R]`.
        seq_lens: `[>= R]` int32. skips: `[R]` int32, or `[L, R]`.
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
    block = min(1024, max(16, triton.next_power_of_2(num_rows)))
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


def gather_shifted_block_tables_reference(
    dst: torch.Tensor, src: torch.Tensor, skips: torch.Tensor, block_size: int
) -> None:
    """PyTorch twin of `gather_shifted_block_tables`."""
    if skips.dim() == 2:
        for layer in range(skips.shape[0]):
            source = src[layer if src.shape[0] > 1 else 0]
            gather_shifted_block_tables_reference(dst[layer], source, skips[layer], block_size)
        return
    for r, skip in enumerate(skips.tolist()):
        row = src[r, skip // block_size :][: dst.shape[1]]
        dst[r] = 0
        dst[r, : row.shape[0]] = row


def effective_lens_reference(
    dst: torch.Tensor, seq_lens: torch.Tensor, skips: torch.Tensor, block_size: int = 1
) -> None:
    """PyTorch twin of `effective_lens`."""
    num_rows = skips.shape[-1]
    aligned = skips // block_size * block_size
    dst[..., :num_rows] = (seq_lens[:num_rows] - aligned).clamp_min(0)


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
