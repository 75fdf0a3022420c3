# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` in C++, as `kernels/cpu/functions.py` calls the other kernels."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu import checks
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import RECENT_MASS
from vllm_pyramid.kernels.log_sum_exp import check_some_requests
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.thinning.kernels import RecentBatch


def recent_mass(
    batch: RecentBatch,
    softmax: Softmax,
    *,
    distance_weight: float,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum in C++, where one thread computes each number: any number of threads gives its bits."""
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    scale, soft_cap = softmax.scale, softmax.soft_cap
    key_strides = checks.check_cache("key_cache", key_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    checks.check_head_size(head_size)
    query_strides = checks.check_heads("query", query, kv_heads, head_size)
    requests = batch.seq_lens.shape[0]
    check_some_requests(requests)
    if not scale > 0 or soft_cap < 0 or not distance_weight > 0:
        raise ValueError(
            f"scale {scale} and distance_weight {distance_weight} must be positive, soft_cap "
            f"{soft_cap} at least 0"
        )
    checks.check_scale("key_scale", batch.key_scale, batch.key_scales)
    sinks_address, sinks_code = checks.sinks_and_code(softmax.sinks, query.shape[1])
    columns = int(batch.contexts.max()) if batch.max_context is None else batch.max_context
    out = torch.zeros((requests, kv_heads, columns), dtype=torch.float32)
    record = RECENT_MASS.pack(
        out.data_ptr(),
        checks.lse_address(log_sum_exp, query),
        query.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        checks.vector_address("query_ends", batch.query_ends, requests),
        checks.vector_address("seq_lens", batch.seq_lens, requests),
        checks.vector_address("skips", batch.skips, requests),
        checks.vector_address("recents", batch.recents, requests),
        checks.vector_address("contexts", batch.contexts, requests),
        sinks_address,
        *(checks.dtype_code("query", query), checks.cache_code(key_cache), sinks_code),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], columns),
        *query_strides,
        *key_strides,
        *(checks.table_stride(block_table, requests), torch.get_num_threads()),
        *(scale * batch.key_scale, soft_cap, distance_weight),
    )
    run("recent_mass", record)
    return out
