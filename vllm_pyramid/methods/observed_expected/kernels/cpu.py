# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected` in C++."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu import checks
from vllm_pyramid.kernels.cpu.eviction import longest_prompt, scores_record
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import FUTURE_QUERIES, OBSERVED_EXPECTED
from vllm_pyramid.kernels.log_sum_exp import check_some_requests
from vllm_pyramid.kernels.records import Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.observed_expected.kernels.reference import check_scored
from vllm_pyramid.step.rotary import Rotary


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
    checks.check_head_size(size)
    query_strides = checks.check_heads("query", query, 1, size)
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
        code = checks.dtype_code("cos_sin", cos_sin)
        table = (cos_sin.data_ptr(), code, rows, rotated, int(rotary.halves), cos_sin.stride(0))
    address, code, rows, rotated, halves, stride = table
    out = torch.empty((requests, heads, queries, size), dtype=torch.float32)
    record = FUTURE_QUERIES.pack(
        *(out.data_ptr(), query.data_ptr(), address),
        checks.vector_address("query_ends", query_ends, requests),
        checks.vector_address("last_positions", last_positions, requests),
        *(checks.dtype_code("query", query), code),
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
    strides = checks.check_caches(batch.key_cache, value_cache)
    checks.check_scale("value_scale", 1.0, value_scales)
    requests, kv_heads = batch.prompt_lens.shape[0], value_cache.shape[1]
    out = torch.empty((requests, kv_heads, longest_prompt(batch)), dtype=torch.float32)
    scores = scores_record(out, batch, softmax, Reduction("mean", "avg", shape.kernel_size))
    record = OBSERVED_EXPECTED.pack(
        *(scores, value_cache.data_ptr()),
        future.data_ptr() if future is not None and shape.expected else 0,
        0 if starts is None else checks.vector_address("starts", starts, requests),
        *strides[3:],
        *(shape.sinks, shape.window),
        shape.expected,
    )
    run("observed_expected", record)
    return out
