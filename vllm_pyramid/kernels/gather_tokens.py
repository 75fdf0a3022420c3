# SPDX-License-Identifier: Apache-2.0
"""Copies of one request's tokens out of the cache, with their scales, and checks of scales."""

from __future__ import annotations

import torch


def gather_tokens(
    cache_PGND: torch.Tensor, block_row: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    """Copy the tokens `start .. end - 1` of one request out of the cache: `[end - start, G, D]`.

    `block_row` is `[M]`, or `[G, M]` if each KV head has a list of pages.
    """
    block_size = cache_PGND.shape[2]
    positions = torch.arange(start, end, device=cache_PGND.device)
    blocks = block_row[..., positions // block_size].long()
    if blocks.dim() == 2:
        heads = torch.arange(blocks.shape[0], device=blocks.device)[:, None]
        return cache_PGND[blocks, heads, positions % block_size].transpose(0, 1)
    return cache_PGND[blocks, :, positions % block_size]


def gather_scaled(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    block_row: torch.Tensor,
    start: int,
    end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Copy as `gather_tokens`, in `dtype`, times each row's scale: `[P, G, N]`, or None for 1."""
    rows = gather_tokens(cache, block_row, start, end).to(dtype)
    if scales is None:
        return rows
    return rows.mul_(gather_tokens(scales[..., None], block_row, start, end).to(dtype))


def check_scales(scales: torch.Tensor | None, cache: torch.Tensor) -> None:
    """Raise ValueError unless `scales` is float32 `[P, G, N]`, or None for a cache of floats."""
    if scales is None:
        if cache.dtype == torch.int8:
            raise ValueError("a cache of int8 needs a scale for each token and KV head")
        return
    if scales.dtype != torch.float32 or scales.shape != cache.shape[:3]:
        raise ValueError(
            f"scales must be float32 {list(cache.shape[:3])}, as the cache's rows, got "
            f"{scales.dtype} {list(scales.shape)}"
        )


def check_one_table(block_table: torch.Tensor) -> None:
    """Raise ValueError if each KV head has a table of its own: for kernels that read one of all."""
    if block_table.dim() != 2:
        raise ValueError(
            f"this kernel takes a block table [>= R, M] of all KV heads, got "
            f"{list(block_table.shape)}"
        )


def check_head_tables(block_table: torch.Tensor, kv_heads: int, sliding_window: int) -> None:
    """Raise ValueError unless tables of KV heads, `[R, G, M]`, fit the cache and the layer."""
    if block_table.dim() == 3 and (block_table.shape[1] != kv_heads or sliding_window):
        raise ValueError(
            f"a block table of each KV head must be [>= R, {kv_heads}, M] without a sliding "
            f"window, got {list(block_table.shape)} and sliding_window {sliding_window}"
        )


def check_one_scale(*scales: torch.Tensor | None) -> None:
    """Raise ValueError if any argument is given: for kernels that read no scales of tokens."""
    if any(one is not None for one in scales):
        raise ValueError("this kernel takes one scale a layer, and none of every token and KV head")
