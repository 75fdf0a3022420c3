# SPDX-License-Identifier: Apache-2.0
"""Launchers of the window scores, a part of `functions.py`: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.log_sum_exp import check_lse, check_some_requests
from vllm_pyramid.kernels.records import Reduction, Softmax, WindowBatch
from vllm_pyramid.kernels.triton.checks import check_keys, check_query, check_table
from vllm_pyramid.kernels.triton.tiles import score_config
from vllm_pyramid.kernels.triton.window_scores import (
    join_log_sum_exp_kernel,
    pool_kernel,
    window_mass_kernel,
    window_max_sum_kernel,
)

LOG2_E = 1.4426950408889634
KEYS_PER_SPLIT = 512


def window_scores(
    batch: WindowBatch,
    softmax: Softmax,
    reduction: Reduction,
    *,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score by the mass kernels, then pool; `log_sum_exp` may have any strides."""
    mass = _window_mass(batch, softmax, reduction.gqa_reduce, log_sum_exp)
    return _pooled(mass, batch, reduction)


def _window_mass(
    batch: WindowBatch, softmax: Softmax, gqa_reduce: str, log_sum_exp: torch.Tensor | None
) -> torch.Tensor:
    """Return the scores before pooling: `[R, G, max_prompt_len - window]` float32."""
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    prompt_lens, window, max_prompt_len = batch.prompt_lens, batch.window, batch.max_prompt_len
    scales, scale_strides = check_keys(key_cache, batch.key_scales)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    group = check_query(query, key_cache)
    num_requests = prompt_lens.shape[0]
    check_some_requests(num_requests)
    check_table(block_table, num_requests)
    if window < 1:
        raise ValueError(f"window {window} must be positive")
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    if max_prompt_len is None:
        max_prompt_len = int(prompt_lens.max().item())
    num_columns = max_prompt_len - window
    if num_columns < 1:
        raise ValueError(
            f"prompts of {max_prompt_len} tokens have none before a window of {window}"
        )

    device = query.device
    config = score_config(head_size, query.element_size(), group, window)
    switches = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "WINDOW": window,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HAS_KEY_SCALES": batch.key_scales is not None,
        "HAS_SOFT_CAP": softmax.soft_cap != 0,
        **config,
    }
    inputs = (query, key_cache, scales, block_table, batch.query_ends, prompt_lens)
    scalars = (softmax.scale * batch.key_scale * LOG2_E, softmax.soft_cap * LOG2_E)
    strides = (*query.stride()[:2], *key_cache.stride()[:3], *scale_strides, block_table.stride(0))
    lse_by_token = log_sum_exp is not None
    if log_sum_exp is None:
        num_rows = num_requests * num_kv_heads * group * window
        splits = triton.cdiv(max_prompt_len, KEYS_PER_SPLIT)
        # Two tensors: the second half of one tensor could be unaligned, which is another variant.
        partial_max, partial_sum = (
            torch.empty(num_rows, splits, dtype=torch.float32, device=device) for _ in range(2)
        )
        row_tiles = triton.cdiv(group, config["HEADS"]) * triton.cdiv(window, config["WINDOW_TILE"])
        window_max_sum_kernel[(num_requests * num_kv_heads, row_tiles, splits)](
            partial_max,
            partial_sum,
            *inputs,
            *scalars,
            splits,
            *strides,
            TILES_PER_SPLIT=KEYS_PER_SPLIT // config["BLOCK_K"],
            **switches,
        )
        log_sum_exp = torch.empty(num_rows, dtype=torch.float32, device=device)
        join_log_sum_exp_kernel[(triton.cdiv(num_rows, 64),)](
            log_sum_exp,
            partial_max,
            partial_sum,
            num_rows,
            splits,
            ROWS=64,
            SPLITS_TILE=16,
            num_warps=4,
        )
    shape = (num_requests, num_kv_heads, num_columns)
    mass = torch.empty(shape, dtype=torch.float32, device=device)
    window_mass_kernel[(num_requests * num_kv_heads, triton.cdiv(num_columns, config["BLOCK_K"]))](
        mass,
        log_sum_exp,
        # Without sinks the kernel needs a pointer that it does not read.
        softmax.sinks if softmax.sinks is not None else prompt_lens,
        *inputs,
        *scalars,
        num_columns,
        *(log_sum_exp.stride() if lse_by_token else (1, window)),
        *strides,
        LSE_BY_TOKEN=lse_by_token,
        REDUCE=gqa_reduce,
        HAS_SINKS=softmax.sinks is not None,
        **switches,
    )
    return mass


def _pooled(mass: torch.Tensor, batch: WindowBatch, reduction: Reduction) -> torch.Tensor:
    if reduction.pooling == "none" or reduction.kernel_size == 1:
        return mass
    average = reduction.pooling == "avg"
    return pool(mass, batch.prompt_lens, batch.window, reduction.kernel_size, average=average)


def pool(
    mass: torch.Tensor, prompt_lens: torch.Tensor, window: int, kernel_size: int, *, average: bool
) -> torch.Tensor:
    """Pool the mass `[R, G, columns]` along the positions, with stride 1 and the same width."""
    num_requests, num_kv_heads, num_columns = mass.shape
    pooled = torch.empty_like(mass)
    block = min(1024, max(128, triton.next_power_of_2(num_columns)))
    pool_kernel[(num_requests * num_kv_heads, triton.cdiv(num_columns, block))](
        pooled,
        mass,
        prompt_lens,
        num_columns,
        NUM_KV_HEADS=num_kv_heads,
        WINDOW=window,
        KERNEL_SIZE=kernel_size,
        AVERAGE=average,
        BLOCK=block,
        num_warps=4,
    )
    return pooled
