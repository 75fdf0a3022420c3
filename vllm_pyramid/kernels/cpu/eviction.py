# SPDX-License-Identifier: Apache-2.0
"""Launchers of the C++ kernels that score, select and compact: a part of `functions.py`."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu import checks
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import COMPACT, SCORES, SELECT
from vllm_pyramid.kernels.log_sum_exp import check_scores, check_some_requests
from vllm_pyramid.kernels.records import GQA_REDUCTIONS, POOLINGS, Reduction, Softmax, WindowBatch


def window_scores(
    batch: WindowBatch,
    softmax: Softmax,
    reduction: Reduction,
    *,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score all KV heads of all requests, in parallel over chunks of keys."""
    requests, window = batch.prompt_lens.shape[0], batch.window
    check_some_requests(requests)
    if window < 1:
        raise ValueError(f"window {window} must be >= 1")
    columns = longest_prompt(batch) - window
    if columns < 1:
        raise ValueError(
            f"prompts of {columns + window} tokens have none before a window of {window}"
        )
    kv_heads = batch.key_cache.shape[1]
    out = torch.empty((requests, kv_heads, columns), dtype=torch.float32)
    run("window_scores", scores_record(out, batch, softmax, reduction, log_sum_exp))
    return out


def longest_prompt(batch: WindowBatch) -> int:
    if batch.max_prompt_len is not None:
        return batch.max_prompt_len
    return int(batch.prompt_lens.max())


def scores_record(
    out: torch.Tensor,
    batch: WindowBatch,
    softmax: Softmax,
    reduction: Reduction,
    log_sum_exp: torch.Tensor | None = None,
) -> bytes:
    """Check the arguments and pack a `PyrScores`; `out` is `[R, G, columns]`."""
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    key_strides = checks.check_cache("key_cache", key_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    checks.check_head_size(head_size)
    query_strides = checks.check_heads("query", query, kv_heads, head_size)
    if softmax.soft_cap < 0:
        raise ValueError(f"soft_cap {softmax.soft_cap} must be >= 0")
    checks.check_scale("key_scale", batch.key_scale, batch.key_scales)
    requests, columns = out.shape[0], out.shape[2]
    sinks_address, sinks_code = checks.sinks_and_code(softmax.sinks, query.shape[1])
    return SCORES.pack(
        out.data_ptr(),
        checks.lse_address(log_sum_exp, query),
        query.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        checks.vector_address("query_ends", batch.query_ends, requests),
        checks.vector_address("prompt_lens", batch.prompt_lens, requests),
        sinks_address,
        *(checks.dtype_code("query", query), checks.cache_code(key_cache), sinks_code),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], columns),
        *query_strides,
        *key_strides,
        checks.table_stride(block_table, requests),
        batch.window,
        GQA_REDUCTIONS.index(reduction.gqa_reduce),
        POOLINGS.index(reduction.pooling),
        *(reduction.kernel_size, torch.get_num_threads()),
        *(softmax.scale * batch.key_scale, softmax.soft_cap),
    )


def select(
    scores: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    max_keep: int | None = None,
) -> torch.Tensor:
    """Select by a radix search for the k-th score, with one thread for each KV head."""
    check_scores(scores)
    requests, heads, columns = scores.shape
    check_some_requests(requests)
    if window < 0 or sinks < 0:
        raise ValueError(f"window {window} and sinks {sinks} must be >= 0")
    longest = int(keeps.max()) if max_keep is None else max_keep
    out = torch.empty((requests, heads, max(longest, 0)), dtype=torch.int32)
    record = SELECT.pack(
        out.data_ptr(),
        scores.data_ptr(),
        checks.vector_address("prompt_lens", prompt_lens, requests),
        checks.vector_address("keeps", keeps, requests),
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
    """Move rows as bytes, for elements of any size; `max_keep` is not used."""
    del max_keep
    strides = checks.check_caches(key_cache, value_cache)
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
        checks.vector_address("prompt_lens", prompt_lens, requests),
        checks.vector_address("keeps", keeps, requests),
        *(key_cache.element_size(), heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], kept.shape[2]),
        *strides,
        *(checks.table_stride(block_table, requests), *kept.stride()[:2], torch.get_num_threads()),
    )
    run("compact", record)
