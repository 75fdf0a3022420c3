# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes, dtypes and strides before a call into C++; all raise ValueError."""

from __future__ import annotations

import math

import torch

from vllm_pyramid.kernels.gather_tokens import check_one_scale
from vllm_pyramid.kernels.log_sum_exp import check_lse

MAX_HEAD_SIZE = 512  # kMaxHeadSize of csrc/cpu/kernels.h
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_CODES = DTYPE_CODES | {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}


def check_cache(name: str, cache: torch.Tensor) -> tuple[int, ...]:
    if cache.dim() != 4:
        raise ValueError(f"{name} must be [P, G, N, D], got shape {tuple(cache.shape)}")
    if cache.stride(3) != 1:
        raise ValueError(
            f"{name} must have unit stride in its last dimension, got {cache.stride()}"
        )
    return cache.stride()[:3]


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[int, ...]:
    strides = check_cache("key_cache", key_cache) + check_cache("value_cache", value_cache)
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            "key_cache and value_cache differ: "
            f"{tuple(key_cache.shape)} {key_cache.dtype}, "
            f"{tuple(value_cache.shape)} {value_cache.dtype}"
        )
    return strides


def dtype_code(name: str, tensor: torch.Tensor) -> int:
    """Return the `PyrDtype` of `csrc/cpu/abi.h` for the dtype of queries or outputs."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; the C++ kernels take float32, bfloat16 and float16"
        )
    return code


def cache_code(key_cache: torch.Tensor) -> int:
    code = CACHE_CODES.get(key_cache.dtype)
    if code is None:
        raise ValueError(
            f"key_cache has dtype {key_cache.dtype}; the C++ kernels take float32, bfloat16, "
            "float16, float8_e4m3fn and float8_e5m2"
        )
    return code


def check_scale(name: str, scale: float, of_tokens: torch.Tensor | None = None) -> None:
    check_one_scale(of_tokens)
    if not 0 < scale < math.inf:
        raise ValueError(f"{name} must be positive, got {scale}")


def check_heads(name: str, tensor: torch.Tensor, heads: int, head_size: int) -> tuple[int, int]:
    """Check for `[T, a multiple of heads, head_size]`, and return the two outer strides."""
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) != 3 or shape[2] != head_size or heads == 0 or shape[1] % heads or not shape[1]:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; the cache has {heads} KV heads of {head_size}, so "
            f"it must be [T, a multiple of {heads}, {head_size}]"
        )
    if strides[2] != 1:
        raise ValueError(f"{name} must have unit stride in its last dimension, got {strides}")
    return strides[0], strides[1]


def check_head_size(head_size: int) -> None:
    """Check that a head fills whole vectors and fits the kernels' scratch."""
    if head_size % 8 or not 8 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"head size {head_size}: the C++ kernels take multiples of 8 up to {MAX_HEAD_SIZE}"
        )


def vector_address(name: str, tensor: torch.Tensor, length: int) -> int:
    """Return the address of a contiguous int32 vector with `length` entries."""
    if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.shape[0] != length:
        raise ValueError(
            f"{name} must be int32 [{length}], got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if length > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride(0)}")
    return tensor.data_ptr()


def lse_address(log_sum_exp: torch.Tensor | None, query: torch.Tensor) -> int:
    """Return the address of a contiguous float32 `[T, H]`; 0 for None."""
    if log_sum_exp is None:
        return 0
    check_lse(log_sum_exp, query, dense=True)
    return log_sum_exp.data_ptr()


def sinks_and_code(sinks: torch.Tensor | None, heads: int) -> tuple[int, int]:
    """Return the address and the `PyrDtype` of contiguous sinks `[H]`; zeros for None."""
    if sinks is None:
        return 0, 0
    code = dtype_code("sinks", sinks)
    if sinks.shape != (heads,) or (heads > 1 and sinks.stride(0) != 1):
        raise ValueError(
            f"sinks must be contiguous [{heads}], got {tuple(sinks.shape)}, strides "
            f"{sinks.stride()}"
        )
    return sinks.data_ptr(), code


def head_table_strides(table: torch.Tensor, requests: int) -> tuple[int, int]:
    """Check a table `[R, G, M]` of each KV head, and return the strides of rows and KV heads."""
    if not table.stride(1):  # stands for one table of all heads in C++
        raise ValueError(
            f"block_table of each KV head must have a list in memory for each, got "
            f"{list(table.shape)}, strides {table.stride()}"
        )
    return table_stride(table[:, 0], requests), table.stride(1)


def table_stride(table: torch.Tensor, requests: int) -> int:
    """Check a block table, and return the stride of its rows."""
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] < requests:
        raise ValueError(
            f"block_table must be int32 [>= {requests}, M], got {table.dtype} {tuple(table.shape)}"
        )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"rows of block_table must be contiguous, got {table.stride()}")
    return table.stride(0)
