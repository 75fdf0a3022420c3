# SPDX-License-Identifier: Apache-2.0
"""Checks on the host before a launch: shapes, dtypes and strides, never values on the device."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.gather_tokens import check_scales
from vllm_pyramid.kernels.log_sum_exp import check_lse
from vllm_pyramid.kernels.records import FP8_DTYPES

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)
# Dtypes of keys that have a scale for each token and KV head.
SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def check_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = CACHE_DTYPES,
    *,
    same_blocks: bool = True,
) -> None:
    """Raise ValueError unless both caches are `[P, G, N, D]` of one of `dtypes`, unit stride in D.

    With `same_blocks` false the two may differ in P.
    """
    first = 0 if same_blocks else 1
    if key_cache.dim() != 4 or key_cache.shape[first:] != value_cache.shape[first:]:
        raise ValueError(
            "key and value cache must both be [blocks, KV heads, block size, head size], got "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if key_cache.dtype not in dtypes or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"key and value cache must have one dtype of {dtypes}, got {key_cache.dtype} and "
            f"{value_cache.dtype}"
        )
    check_unit_stride("key_cache", key_cache)
    check_unit_stride("value_cache", value_cache)


def check_keys(
    key_cache: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Check K alone, and return the scales of its tokens with their strides, for a kernel.

    Without scales the result is the key cache, a pointer that the kernel does not read, and zeros.
    """
    check_cache(key_cache, key_cache, CACHE_DTYPES if scales is None else SCALED_DTYPES)
    check_scales(scales, key_cache)
    return (key_cache, (0, 0, 0)) if scales is None else (scales, scales.stride())


def check_query(query: torch.Tensor, key_cache: torch.Tensor) -> int:
    """Check that `[T, H, D]` fits the cache, and return the number of query heads per KV head."""
    num_kv_heads, _, head_size = key_cache.shape[1:]
    if query.dim() != 3 or query.shape[2] != head_size or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} must be [tokens, a multiple of {num_kv_heads} heads, "
            f"{head_size}] for the cache given"
        )
    if query.dtype != key_cache.dtype and key_cache.dtype not in (*FP8_DTYPES, *SCALED_DTYPES):
        raise ValueError(f"query is {query.dtype}, the cache {key_cache.dtype}; they must be equal")
    if query.dtype in FP8_DTYPES:
        raise ValueError(f"query is {query.dtype}; 8-bit floats are for caches")
    check_unit_stride("query", query)
    return query.shape[1] // num_kv_heads


def check_table(block_table: torch.Tensor, num_requests: int) -> None:
    """Raise ValueError unless the block table has a row for every request."""
    if block_table.dim() != 2 or block_table.shape[0] < num_requests:
        raise ValueError(
            f"block_table {tuple(block_table.shape)} must be [>= {num_requests}, entries]"
        )
    check_unit_stride("block_table", block_table)


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"the last dimension of {name} must have stride 1, got strides {tensor.stride()}"
        )


def lse_or(log_sum_exp: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """Return a checked, contiguous `[T, H]`; for None `query`, a pointer that no kernel reads."""
    if log_sum_exp is None:
        return query
    check_lse(log_sum_exp, query, dense=True)
    return log_sum_exp
