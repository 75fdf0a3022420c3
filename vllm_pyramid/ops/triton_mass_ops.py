# SPDX-License-Identifier: Apache-2.0
"""`key_mass` of `paged_attention` on Triton: scratch memory and launches (see `triton_ops.py`)."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.ops.triton_config import (
    Workspace,
    choose_num_splits,
    decode_config,
    target_programs,
)
from vllm_pyramid.ops.triton_mass import key_mass_kernel, row_statistics_kernel

LOG2_E = 1.4426950408889634


def add_key_mass(
    key_mass: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int | None,
    workspace: Workspace | None,
) -> None:
    """Launch both passes; arguments as `triton_ops.paged_attention` has checked them.

    The scratch comes from `workspace` where it is large enough, which it is for a decode step of
    as many requests as fill the device or fewer; else it is allocated.
    """
    num_requests = seq_lens.shape[0]
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    config = decode_config(head_size, key_cache.element_size(), group)
    row_tiles = triton.cdiv(max_query_len * group, config["ROWS"])
    if num_splits is None:
        programs = workspace.programs if workspace else target_programs(query.device)
        pairs = num_requests * num_kv_heads * row_tiles
        num_splits = choose_num_splits(programs, pairs, max_seq_len, config["BLOCK_K"])
    scratch = num_tokens * num_heads * num_splits
    if workspace is not None and workspace.partial_max.numel() >= scratch:
        partials = (workspace.partial_max, workspace.partial_sum)
    else:
        memory = torch.empty(2, scratch, dtype=torch.float32, device=query.device)
        partials = (memory[0], memory[1])
    inputs = (query, key_cache, block_table, query_start_loc, seq_lens, skips)
    scalars = (scale * LOG2_E, soft_cap * LOG2_E, sliding_window)
    strides = (*query.stride()[:2], *key_cache.stride()[:3], block_table.stride(0))
    switches = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "SPLITS": num_splits,
        "HAS_SOFT_CAP": soft_cap != 0,
        "HAS_WINDOW": sliding_window > 0,
        **config,
    }
    row_statistics_kernel[(num_requests * num_kv_heads, row_tiles, num_splits)](
        *partials,
        *inputs,
        sinks if sinks is not None else seq_lens,
        *scalars,
        *strides,
        HAS_SINKS=sinks is not None,
        **switches,
    )
    columns = min(key_mass.shape[2], max_seq_len)
    key_mass_kernel[(num_requests * num_kv_heads, triton.cdiv(columns, config["BLOCK_K"]))](
        key_mass,
        *partials,
        *inputs,
        *scalars,
        key_mass.shape[2],
        *key_mass.stride()[:2],
        *strides,
        **switches,
    )
