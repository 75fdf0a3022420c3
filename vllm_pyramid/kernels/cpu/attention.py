# SPDX-License-Identifier: Apache-2.0
"""Launchers of the C++ kernels that attend and that write the cache: a part of `functions.py`."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.contract import FEWEST_KEYS
from vllm_pyramid.kernels.cpu import checks
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import ATTENTION, CACHE_WRITE, SHARED
from vllm_pyramid.kernels.gather_tokens import check_head_tables
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Softmax

INT32_MAX = 2**31 - 1


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Check and convert the new tokens, and let C++ copy or quantise them."""
    strides = checks.check_caches(key_cache, value_cache)
    blocks, heads, block_size, head_size = key_cache.shape
    source_code = code = 0
    if key_cache.dtype in FP8_DTYPES:
        checks.check_scale("key_scale", key_scale)
        checks.check_scale("value_scale", value_scale)
        source_code, code = checks.dtype_code("key", key), checks.cache_code(key_cache)
        value = value.to(key.dtype)
    elif key.dtype != key_cache.dtype or value.dtype != key_cache.dtype:
        key, value = key.to(key_cache.dtype), value.to(key_cache.dtype)
    key_strides = checks.check_heads("key", key, heads, head_size)
    value_strides = checks.check_heads("value", value, heads, head_size)
    tokens = slot_mapping.shape[0]
    if key.shape[1] != heads or value.shape[1] != heads:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must have the cache's "
            f"{heads} KV heads"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping must be int64 [T], got {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        )
    if min(key.shape[0], value.shape[0]) < tokens or (tokens > 1 and slot_mapping.stride(0) != 1):
        raise ValueError(
            f"slot_mapping must be contiguous and no longer than key and value, got {tokens} slots "
            f"of stride {slot_mapping.stride(0)} for {key.shape[0]} and {value.shape[0]} tokens"
        )
    record = CACHE_WRITE.pack(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        *(source_code, code),
        *(key_cache.element_size(), tokens, heads, head_size, block_size, blocks),
        *key_strides,
        *value_strides,
        *strides,
        torch.get_num_threads(),
        *(key_scale, value_scale),
    )
    run("reshape_and_cache", record)


def paged_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    log_sum_exp: torch.Tensor | None = None,
) -> None:
    """Attend in C++, with each request cut into items by its own lengths alone.

    A request's result does not depend on the rest of the batch, on the number of threads, or on the
    place of the visible positions in its table: the same tokens give the same bits.
    """
    strides = None
    if batch.block_table.dim() == 3:
        heads = batch.key_cache.shape[1]
        check_head_tables(batch.block_table, heads, softmax.sliding_window)
        strides = checks.head_table_strides(batch.block_table, batch.seq_lens.shape[0])
    record = attention_record(out, batch, batch.value_cache, softmax, log_sum_exp, strides)
    run("paged_attention", record)


def shared_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    log_sum_exp: torch.Tensor | None = None,
    fewest_keys: int = FEWEST_KEYS,
) -> None:
    """Attend in C++, which forms the groups from the tables, up to eight levels of nested prefixes.

    Requests in no group get the bits of `paged_attention`; so do all with lists of chosen pages.
    """
    if batch.block_table.dim() == 3:  # chosen pages, which no group shares
        paged_attention(out, batch, softmax, log_sum_exp=log_sum_exp)
        return
    attention = attention_record(out, batch, batch.value_cache, softmax, log_sum_exp)
    run("shared_attention", SHARED.pack(attention, fewest_keys))


def attention_record(
    out: torch.Tensor,
    batch: AttentionBatch,
    value_cache: torch.Tensor,
    softmax: Softmax,
    log_sum_exp: torch.Tensor | None,
    table_of_heads: tuple[int, int] | None = None,
) -> bytes:
    """Check the arguments and pack a `PyrAttention`; `table_of_heads`: strides of row and head."""
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    scale, soft_cap, sliding_window = softmax.scale, softmax.soft_cap, softmax.sliding_window
    if batch.value_table is not None:
        raise ValueError("value_table: the C++ kernels read K and V by one table")
    strides = checks.check_caches(key_cache, value_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    checks.check_head_size(head_size)
    query_strides = checks.check_heads("query", query, kv_heads, head_size)
    out_strides = checks.check_heads("out", out, kv_heads, head_size)
    tokens, heads = query.shape[:2]
    if out.shape != query.shape:
        raise ValueError(f"out {tuple(out.shape)} and query {tuple(query.shape)} must be alike")
    requests = batch.seq_lens.shape[0]
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if sliding_window < 0 or soft_cap < 0:
        raise ValueError(f"sliding_window {sliding_window} and soft_cap {soft_cap} must be >= 0")
    checks.check_scale("key_scale", batch.key_scale, batch.key_scales)
    checks.check_scale("value_scale", batch.value_scale, batch.value_scales)
    sinks_address, sinks_code = checks.sinks_and_code(softmax.sinks, heads)
    return ATTENTION.pack(
        out.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_table.data_ptr(),
        checks.vector_address("query_start_loc", batch.query_start_loc, requests + 1),
        checks.vector_address("seq_lens", batch.seq_lens, requests),
        checks.vector_address("skips", batch.skips, requests),
        sinks_address,
        checks.lse_address(log_sum_exp, query),
        *(checks.dtype_code("out", out), checks.dtype_code("query", query)),
        *(checks.cache_code(key_cache), sinks_code),
        *(tokens, heads, kv_heads, head_size, block_size, blocks, requests, block_table.shape[-1]),
        *out_strides,
        *query_strides,
        *strides,
        *(table_of_heads or (checks.table_stride(block_table, requests), 0)),
        *(min(sliding_window, INT32_MAX), torch.get_num_threads()),
        *(scale * batch.key_scale, soft_cap, batch.value_scale),
    )
