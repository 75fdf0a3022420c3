# SPDX-License-Identifier: Apache-2.0
"""`window_scores` on Triton: checks, scratch memory and launches (see `triton_ops.py`)."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.ops.recall import WindowStatistics, window_statistics
from vllm_pyramid.ops.reference import GQA_REDUCTIONS, POOLINGS
from vllm_pyramid.ops.reference_mass import check_lse
from vllm_pyramid.ops.triton_checks import check_cache, check_float32, check_query, check_table
from vllm_pyramid.ops.triton_config import score_config
from vllm_pyramid.ops.triton_score import (
    join_log_sum_exp_kernel,
    pool_kernel,
    window_mass_kernel,
    window_max_sum_kernel,
)

LOG2_E = 1.4426950408889634
KEYS_PER_SPLIT = 512


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
    compute_dtype: torch.dtype = torch.float32,
    max_prompt_len: int | None = None,
    statistics: bool = False,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, WindowStatistics]:
    """See `reference.window_scores`.

    Args:
        max_prompt_len: the result has `max_prompt_len - window` columns.
        log_sum_exp: may have any strides here.
        statistics: computed from the unpooled mass by PyTorch, outside the kernels: they are for
            the end of a prompt, not for the path of every step. Nothing is read back.
    """
    check_cache(key_cache, key_cache)
    check_float32(compute_dtype)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    group = check_query(query, key_cache)
    num_requests = prompt_lens.shape[0]
    check_table(block_table, num_requests)
    if gqa_reduce not in GQA_REDUCTIONS or pooling not in POOLINGS:
        raise ValueError(
            f"gqa_reduce {gqa_reduce!r} must be one of {GQA_REDUCTIONS}, "
            f"pooling {pooling!r} one of {POOLINGS}"
        )
    if window < 1 or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(
            f"window {window} must be positive, kernel_size {kernel_size} positive and odd"
        )
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
    config = score_config(head_size, key_cache.element_size(), group, window)
    switches = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "WINDOW": window,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HAS_SOFT_CAP": soft_cap != 0,
        **config,
    }
    inputs = (query, key_cache, block_table, query_ends, prompt_lens)
    scalars = (scale * LOG2_E, soft_cap * LOG2_E)
    strides = (*query.stride()[:2], *key_cache.stride()[:3], block_table.stride(0))
    lse_by_token = log_sum_exp is not None
    if log_sum_exp is None:
        num_rows = num_requests * num_kv_heads * group * window
        splits = triton.cdiv(max_prompt_len, KEYS_PER_SPLIT)
        partial = torch.empty(2, num_rows, splits, dtype=torch.float32, device=device)
        row_tiles = triton.cdiv(group, config["HEADS"]) * triton.cdiv(window, config["WINDOW_TILE"])
        window_max_sum_kernel[(num_requests * num_kv_heads, row_tiles, splits)](
            partial[0],
            partial[1],
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
            partial[0],
            partial[1],
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
        *inputs,
        *scalars,
        num_columns,
        *(log_sum_exp.stride() if lse_by_token else (1, window)),
        *strides,
        LSE_BY_TOKEN=lse_by_token,
        REDUCE=gqa_reduce,
        **switches,
    )
    scores = mass
    if pooling != "none" and kernel_size > 1:
        scores = pool(mass, prompt_lens, window, kernel_size, average=pooling == "avg")
    if statistics:
        return scores, window_statistics(mass, prompt_lens, window=window)
    return scores


def pool(
    mass: torch.Tensor, prompt_lens: torch.Tensor, window: int, kernel_size: int, *, average: bool
) -> torch.Tensor:
    """The pooling of `reference.window_scores`, on the mass `[R, G, columns]`."""
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
