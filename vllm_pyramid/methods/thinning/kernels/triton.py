# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` in Triton: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.log_sum_exp import check_some_requests
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.kernels.triton.checks import check_keys, check_query, check_table, lse_or
from vllm_pyramid.kernels.triton.tiles import recent_config
from vllm_pyramid.methods.thinning.kernels import RecentBatch
from vllm_pyramid.methods.thinning.kernels.triton_kernels import (
    recent_log_sum_exp_kernel,
    recent_mass_kernel,
)

LOG2_E = 1.4426950408889634


def recent_mass(
    batch: RecentBatch,
    softmax: Softmax,
    *,
    distance_weight: float,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum in one launch with `log_sum_exp`, in two without; read back a missing `max_context`."""
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    scales, scale_strides = check_keys(key_cache, batch.key_scales)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    group = check_query(query, key_cache)
    num_requests = batch.seq_lens.shape[0]
    check_some_requests(num_requests)
    check_table(block_table, num_requests)
    columns = batch.max_context
    if columns is None:
        columns = int(batch.contexts.max().item())
    given = log_sum_exp is not None
    lse = lse_or(log_sum_exp, query)
    config = recent_config(head_size, query.element_size())
    inputs = (query, key_cache, scales, block_table, batch.query_ends, batch.seq_lens, batch.skips)
    scalars = (softmax.scale * batch.key_scale * LOG2_E, softmax.soft_cap * LOG2_E)
    strides = (*query.stride()[:2], *key_cache.stride()[:3], *scale_strides, block_table.stride(0))
    switches = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HAS_KEY_SCALES": batch.key_scales is not None,
        "HAS_SOFT_CAP": softmax.soft_cap != 0,
        **config,
    }
    pairs = num_requests * num_kv_heads
    if not given:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        most = batch.max_recent or query.shape[0]  # recent queries are queries of the step
        tiles = triton.cdiv(most * group, config["ROWS"])
        recent_log_sum_exp_kernel[(pairs, tiles)](
            lse, *inputs, batch.recents, *scalars, *strides, **switches
        )
    mass = torch.empty(
        num_requests, num_kv_heads, columns, dtype=torch.float32, device=query.device
    )
    recent_mass_kernel[(pairs, triton.cdiv(columns, config["BLOCK_K"]))](
        mass,
        lse,
        # Without sinks the kernel needs a pointer that it does not read.
        softmax.sinks if softmax.sinks is not None else batch.seq_lens,
        *inputs,
        batch.recents,
        batch.contexts,
        *scalars,
        float(distance_weight),
        columns,
        *strides,
        HAS_SINKS=softmax.sinks is not None,
        **switches,
    )
    return mass
