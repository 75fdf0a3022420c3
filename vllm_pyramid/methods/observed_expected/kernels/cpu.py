# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected` in C++."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu.checks import (
    cache_code,
    check_caches,
    check_head_size,
    check_heads,
    check_scale,
    dtype_code,
    sinks_and_code,
    table_stride,
    vector_address,
)
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import (
    PyrFutureQueries,
    PyrObservedExpected,
    PyrScores,
    packer,
)
from vllm_pyramid.kernels.log_sum_exp import check_some_requests
from vllm_pyramid.kernels.records import GQA_REDUCTIONS, POOLINGS, Softmax, WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.observed_expected.kernels.reference import check_scored
from vllm_pyramid.step.rotary import Rotary

_pack_scores = packer(PyrScores)
_pack_observed_expected = packer(PyrObservedExpected)
_pack_future_queries = packer(PyrFutureQueries)


def future_queries(
    query: torch.Tensor,
    query_ends: torch.Tensor,
    last_positions: torch.Tensor,
    rotary: Rotary | None,
    *,
    queries: int,
    positions: int,
) -> torch.Tensor:
    """Turn them by a table of any of the dtypes that a model has, with one thread a request."""
    requests, (tokens, heads, size) = query_ends.shape[0], query.shape
    check_some_requests(requests)
    check_head_size(size)
    query_strides = check_heads("query", query, 1, size)
    if queries < 1 or positions < 1:
        raise ValueError(f"queries {queries} and positions {positions} must be at least 1")
    table = (0, 0, 0, 0, 1, 0)
    if rotary is not None:
        cos_sin = rotary.cos_sin
        rows, rotated = cos_sin.shape
        if rotated % 2 or rotated > size:
            raise ValueError(f"{rotated} channels cannot turn, of heads with {size}")
        if cos_sin.stride(1) != 1:
            raise ValueError(f"rows of cos_sin must be contiguous, got {cos_sin.stride()}")
        code = dtype_code("cos_sin", cos_sin)
        table = (cos_sin.data_ptr(), code, rows, rotated, int(rotary.halves), cos_sin.stride(0))
    address, code, rows, rotated, halves, stride = table
    out = torch.empty((requests, heads, queries, size), dtype=torch.float32)
    record = _pack_future_queries(
        *(out.data_ptr(), query.data_ptr(), address),
        vector_address("query_ends", query_ends, requests),
        vector_address("last_positions", last_positions, requests),
        *(dtype_code("query", query), code),
        *(tokens, heads, size, requests, queries, positions, rows, rotated, halves),
        *(*query_strides, stride, torch.get_num_threads()),
    )
    run("future_queries", record)
    return out


def observed_expected_scores(
    batch: WindowBatch,
    value_cache: torch.Tensor,
    softmax: Softmax,
    shape: ScoreShape,
    *,
    future: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score all KV heads of all requests, in parallel over chunks of keys.

    A request's bits depend neither on the batch, nor on threads, nor on its place in its table.
    """
    check_scored(batch, shape, future)
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    requests = batch.prompt_lens.shape[0]
    strides = check_caches(key_cache, value_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    check_head_size(head_size)
    query_strides = check_heads("query", query, kv_heads, head_size)
    if softmax.soft_cap < 0:
        raise ValueError(f"soft_cap {softmax.soft_cap} must be >= 0")
    check_scale("key_scale", batch.key_scale, batch.key_scales)
    check_scale("value_scale", 1.0, value_scales)
    future_address = 0
    if future is not None and shape.expected:
        if not future.is_contiguous():
            raise ValueError(f"future must be contiguous, got strides {future.stride()}")
        future_address = future.data_ptr()
    longest = batch.max_prompt_len
    if longest is None:
        longest = int(batch.prompt_lens.max())
    sinks_address, sinks_code = sinks_and_code(softmax.sinks, query.shape[1])
    out = torch.empty((requests, kv_heads, longest), dtype=torch.float32)
    scores = _pack_scores(
        *(out.data_ptr(), 0, query.data_ptr(), key_cache.data_ptr(), block_table.data_ptr()),
        vector_address("query_ends", batch.query_ends, requests),
        vector_address("prompt_lens", batch.prompt_lens, requests),
        sinks_address,
        *(dtype_code("query", query), cache_code(key_cache), sinks_code),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], longest),
        *query_strides,
        *strides[:3],
        table_stride(block_table, requests),
        *(batch.window, GQA_REDUCTIONS.index("mean"), POOLINGS.index("avg"), shape.kernel_size),
        torch.get_num_threads(),
        *(softmax.scale * batch.key_scale, softmax.soft_cap),
    )
    record = _pack_observed_expected(
        *(scores, value_cache.data_ptr(), future_address),
        0 if starts is None else vector_address("starts", starts, requests),
        *strides[3:],
        *(shape.sinks, shape.window),
        shape.expected,
    )
    run("observed_expected", record)
    return out
