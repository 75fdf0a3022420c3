# SPDX-License-Identifier: Apache-2.0
"""`add_key_mass` in Triton: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton.checks import check_keys, check_query, check_table, lse_or
from vllm_pyramid.kernels.triton.tiles import (
    Workspace,
    choose_num_splits,
    decode_config,
    target_programs,
)
from vllm_pyramid.methods.accumulated.kernels.reference import check_mass
from vllm_pyramid.methods.accumulated.kernels.triton_kernels import (
    key_mass_kernel,
    row_statistics_kernel,
)

LOG2_E = 1.4426950408889634


def add_key_mass(
    mass: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    kind: str = "sum",
    first_queries: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: Workspace | None = None,
) -> None:
    """Add the mass in two launches: the softmax of the rows, then the sums of the keys.

    With `log_sum_exp` there is only the second launch, and no scratch. Otherwise the scratch comes
    from `workspace` if that is large enough, and is allocated if not.
    """
    query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
    query_start_loc, seq_lens, skips = batch.query_start_loc, batch.seq_lens, batch.skips
    max_query_len, max_seq_len = batch.max_query_len, batch.max_seq_len
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    scales, scale_strides = check_keys(key_cache, batch.key_scales)
    group = check_query(query, key_cache)
    check_mass(mass, key_cache, kind)
    lse = lse_or(log_sum_exp, query)
    num_requests = seq_lens.shape[0]
    check_table(block_table, num_requests)
    if first_queries is not None and first_queries.shape[0] < num_requests:
        raise ValueError(
            f"first_queries has {first_queries.shape[0]} entries for {num_requests} requests"
        )
    num_tokens, num_heads, head_size = query.shape
    if num_requests == 0 or num_tokens == 0:
        return
    num_kv_heads, block_size = key_cache.shape[1:3]
    if max_query_len is None:
        spans = query_start_loc[1 : num_requests + 1] - query_start_loc[:num_requests]
        max_query_len = int(spans.max().item())
    if max_seq_len is None:
        max_seq_len = block_table.shape[1] * block_size
    config = decode_config(head_size, query.element_size(), group)
    row_tiles = triton.cdiv(max_query_len * group, config["ROWS"])
    if log_sum_exp is not None:
        num_splits = 1
    elif num_splits is None:
        programs = workspace.programs if workspace else target_programs(query.device)
        pairs = num_requests * num_kv_heads * row_tiles
        num_splits = choose_num_splits(programs, pairs, max_seq_len, config["BLOCK_K"])
    scratch = num_tokens * num_heads * num_splits
    if log_sum_exp is not None:
        partials = (lse, lse)
    elif workspace is not None and workspace.partial_max.numel() >= scratch:
        partials = (workspace.partial_max, workspace.partial_sum)
    else:
        # Two tensors: the second half of one tensor could be unaligned, which is another variant.
        memory = [torch.empty(scratch, dtype=torch.float32, device=query.device) for _ in range(2)]
        partials = (memory[0], memory[1])
    # Without `first_queries` the kernel needs a pointer that it does not read.
    first = seq_lens if first_queries is None else first_queries
    inputs = (query, key_cache, scales, block_table, query_start_loc, seq_lens, skips, first)
    sink_logits = sinks if sinks is not None else seq_lens
    scalars = (softmax.scale * batch.key_scale * LOG2_E, soft_cap * LOG2_E, sliding_window)
    strides = (*query.stride()[:2], *key_cache.stride()[:3], *scale_strides, block_table.stride(0))
    switches = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "SPLITS": num_splits,
        "HAS_KEY_SCALES": batch.key_scales is not None,
        "HAS_SOFT_CAP": soft_cap != 0,
        "HAS_WINDOW": sliding_window > 0,
        "HAS_FIRST": first_queries is not None,
        "HAS_SINKS": sinks is not None,
        **config,
    }
    if log_sum_exp is None:
        row_statistics_kernel[(num_requests * num_kv_heads, row_tiles, num_splits)](
            *partials, *inputs, sink_logits, *scalars, *strides, **switches
        )
    tiles = triton.cdiv(max_seq_len, config["BLOCK_K"])
    key_mass_kernel[(num_requests * num_kv_heads, tiles)](
        mass,
        *partials,
        lse,
        sink_logits,
        *inputs,
        *scalars,
        *mass.stride()[:2],
        *strides,
        HAS_LSE=log_sum_exp is not None,
        BELOW_AVERAGE=kind == "below_average",
        **switches,
    )
