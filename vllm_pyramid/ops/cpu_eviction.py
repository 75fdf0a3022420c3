# SPDX-License-Identifier: Apache-2.0
"""Scoring, selecting and compacting on the C++ kernels: checks and records (see `cpu.py`)."""

from __future__ import annotations

import torch

from vllm_pyramid.ops.cpu_checks import (
    check_cache,
    check_caches,
    check_head_size,
    check_heads,
    dtype_code,
    lse_address,
    table_stride,
    vector_address,
)
from vllm_pyramid.ops.cpu_records import COMPACT, RECENT_MASS, SCORES, SELECT, run
from vllm_pyramid.ops.recall import WindowStatistics
from vllm_pyramid.ops.reference import GQA_REDUCTIONS, POOLINGS


def window_scores(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: torch.Tensor,
    prompt_lens: torch.Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    gqa_reduce: str = "mean",
    pooling: str = "avg",
    kernel_size: int = 5,
    max_prompt_len: int | None = None,
    statistics: bool = False,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, WindowStatistics]:
    """See `reference.window_scores`."""
    key_strides = check_cache("key_cache", key_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    check_head_size(head_size)
    query_strides = check_heads("query", query, kv_heads, head_size)
    requests = prompt_lens.shape[0]
    if gqa_reduce not in GQA_REDUCTIONS or pooling not in POOLINGS:
        raise ValueError(
            f"gqa_reduce {gqa_reduce!r} must be one of {GQA_REDUCTIONS} and pooling {pooling!r} "
            f"one of {POOLINGS}"
        )
    if window < 1 or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"window {window} must be >= 1 and kernel_size {kernel_size} odd")
    if soft_cap < 0 or requests == 0:
        raise ValueError(f"soft_cap {soft_cap} must be >= 0 and requests {requests} >= 1")
    longest = int(prompt_lens.max()) if max_prompt_len is None else max_prompt_len
    if longest <= window:
        raise ValueError(f"prompts of {longest} tokens have none before a window of {window}")
    out = torch.empty((requests, kv_heads, longest - window), dtype=torch.float32)
    numbers = torch.empty((3, requests, kv_heads), dtype=torch.float32) if statistics else None
    record = SCORES.pack(
        out.data_ptr(),
        0 if numbers is None else numbers.data_ptr(),
        lse_address(log_sum_exp, query),
        query.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        vector_address("query_ends", query_ends, requests),
        vector_address("prompt_lens", prompt_lens, requests),
        *(dtype_code("query", query), dtype_code("key_cache", key_cache)),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], longest - window),
        *query_strides,
        *key_strides,
        table_stride(block_table, requests),
        *(window, GQA_REDUCTIONS.index(gqa_reduce), POOLINGS.index(pooling), kernel_size),
        torch.get_num_threads(),
        *(scale, soft_cap),
    )
    run("window_scores", record)
    return out if numbers is None else (out, WindowStatistics(*numbers))


def recent_mass(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    recents: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    distance_weight: float,
    soft_cap: float = 0.0,
    log_sum_exp: torch.Tensor | None = None,
    max_context: int | None = None,
) -> torch.Tensor:
    """See `reference.recent_mass`."""
    key_strides = check_cache("key_cache", key_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    check_head_size(head_size)
    query_strides = check_heads("query", query, kv_heads, head_size)
    requests = seq_lens.shape[0]
    if not scale > 0 or soft_cap < 0 or not distance_weight > 0:
        raise ValueError(
            f"scale {scale} and distance_weight {distance_weight} must be positive, soft_cap "
            f"{soft_cap} at least 0"
        )
    columns = int(contexts.max()) if max_context is None else max_context
    out = torch.zeros((requests, kv_heads, columns), dtype=torch.float32)
    record = RECENT_MASS.pack(
        out.data_ptr(),
        lse_address(log_sum_exp, query),
        query.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        vector_address("query_ends", query_ends, requests),
        vector_address("seq_lens", seq_lens, requests),
        vector_address("skips", skips, requests),
        vector_address("recents", recents, requests),
        vector_address("contexts", contexts, requests),
        *(dtype_code("query", query), dtype_code("key_cache", key_cache)),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], columns),
        *query_strides,
        *key_strides,
        *(table_stride(block_table, requests), torch.get_num_threads()),
        *(scale, soft_cap, distance_weight),
    )
    run("recent_mass", record)
    return out


def select(
    scores: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    max_keep: int | None = None,
) -> torch.Tensor:
    """See `reference.select`."""
    if scores.dim() != 3 or scores.dtype != torch.float32 or scores.stride(2) != 1:
        raise ValueError(
            f"scores must be float32 [R, G, columns] with unit stride in the last dimension, got "
            f"{scores.dtype} {tuple(scores.shape)}, strides {scores.stride()}"
        )
    requests, heads, columns = scores.shape
    if window < 0 or sinks < 0 or requests == 0:
        raise ValueError(f"window {window}, sinks {sinks} must be >= 0, requests {requests} >= 1")
    longest = int(keeps.max()) if max_keep is None else max_keep
    out = torch.empty((requests, heads, max(longest, 0)), dtype=torch.int32)
    record = SELECT.pack(
        out.data_ptr(),
        scores.data_ptr(),
        vector_address("prompt_lens", prompt_lens, requests),
        vector_address("keeps", keeps, requests),
        *(requests, heads, longest, columns, scores.stride(0), scores.stride(1), window, sinks),
        torch.get_num_threads(),
    )
    run("select", record)
    return out


def compact(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kept: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    max_keep: int | None = None,
) -> None:
    """See `reference.compact`. Any element type; `max_keep` is not needed here."""
    del max_keep
    strides = check_caches(key_cache, value_cache)
    blocks, heads, block_size, head_size = key_cache.shape
    requests = prompt_lens.shape[0]
    if kept.dtype != torch.int32 or kept.dim() != 3 or kept.shape[:2] != (requests, heads):
        raise ValueError(
            f"kept must be int32 [{requests}, {heads}, columns], got {kept.dtype} "
            f"{tuple(kept.shape)}"
        )
    if kept.shape[2] > 1 and kept.stride(2) != 1:
        raise ValueError(f"rows of kept must be contiguous, got strides {kept.stride()}")
    record = COMPACT.pack(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_table.data_ptr(),
        kept.data_ptr(),
        vector_address("prompt_lens", prompt_lens, requests),
        vector_address("keeps", keeps, requests),
        *(key_cache.element_size(), heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], kept.shape[2]),
        *strides,
        *(table_stride(block_table, requests), *kept.stride()[:2], torch.get_num_threads()),
    )
    run("compact", record)
