# SPDX-License-Identifier: Apache-2.0
"""Launcher of `paged_attention`, a part of `functions.py`: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.gather_tokens import check_head_tables, check_one_scale
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton.checks import (
    check_cache,
    check_query,
    check_table,
    check_unit_stride,
    lse_or,
)
from vllm_pyramid.kernels.triton.decode import combine_kernel, decode_kernel
from vllm_pyramid.kernels.triton.prefill import prefill_kernel
from vllm_pyramid.kernels.triton.tiles import (
    Workspace,
    choose_num_splits,
    decode_config,
    prefill_config,
    target_programs,
)

LOG2_E = 1.4426950408889634


def paged_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    log_sum_exp: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: Workspace | None = None,
) -> None:
    """Attend with products of the query's dtype, and softmax and sums in float32.

    The split decode kernel serves requests with one query, the prefill kernel all others, which
    each kernel finds out on the device. The batch's `max_seq_len`, by default the table's capacity,
    bounds the number of splits. `num_splits` is a power of two; None: `choose_num_splits`.
    `workspace` is scratch for more than one split; None: allocate it.
    """
    query, key_cache, value_cache = batch.query, batch.key_cache, batch.value_cache
    block_table, query_start_loc = batch.block_table, batch.query_start_loc
    seq_lens, skips = batch.seq_lens, batch.skips
    max_query_len, max_seq_len = batch.max_query_len, batch.max_seq_len
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    own_values = batch.value_table is not None
    check_one_scale(batch.key_scales, batch.value_scales)
    value_table = block_table if batch.value_table is None else batch.value_table
    check_cache(key_cache, value_cache, same_blocks=not own_values)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    group = check_query(query, key_cache)
    check_unit_stride("out", out)
    if out.shape != query.shape:
        raise ValueError(f"out {tuple(out.shape)} and query {tuple(query.shape)} must be equal")
    lse = lse_or(log_sum_exp, query)
    num_requests = seq_lens.shape[0]
    head_stride = 0
    if block_table.dim() == 3:
        check_head_tables(block_table, num_kv_heads, sliding_window)
        check_unit_stride("block_table", block_table)
        if own_values or block_table.shape[0] < num_requests:
            raise ValueError(
                f"a block table of each KV head, {list(block_table.shape)}, must have a row for "
                f"each of {num_requests} requests, and V no table of its own"
            )
        head_stride = block_table.stride(1)
    else:
        check_table(block_table, num_requests)
        check_table(value_table, num_requests)
    if query_start_loc.shape[0] < num_requests + 1 or skips.shape[0] < num_requests:
        raise ValueError(
            f"query_start_loc has {query_start_loc.shape[0]} and skips {skips.shape[0]} entries; "
            f"{num_requests} requests need {num_requests + 1} and {num_requests}"
        )
    if num_requests == 0 or query.shape[0] == 0:
        return
    if max_query_len is None:
        spans = query_start_loc[1 : num_requests + 1] - query_start_loc[:num_requests]
        max_query_len = int(spans.max().item())
    if max_seq_len is None:
        max_seq_len = block_table.shape[-1] * block_size

    element_size = query.element_size()
    config = decode_config(head_size, element_size, group)
    pairs = num_requests * num_kv_heads
    if num_splits is None:
        programs = workspace.programs if workspace else target_programs(query.device)
        num_splits = choose_num_splits(programs, pairs, max_seq_len, config["BLOCK_K"])
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"num_splits must be a power of two, got {num_splits}")
    if num_splits > 1:
        rows = pairs * group * num_splits
        if workspace is None:
            workspace = Workspace.allocate(
                query.shape[1], num_kv_heads, head_size, query.device, rows=rows
            )
        elif workspace.partial_max.numel() < rows or workspace.partial_out.shape[1] != head_size:
            raise ValueError(
                f"the workspace holds {workspace.partial_max.numel()} rows of "
                f"{workspace.partial_out.shape[1]}; {num_requests} requests * {query.shape[1]} "
                f"heads * {num_splits} splits need {rows} of {head_size}: allocate it with rows="
            )
    # With one split the kernel does not touch the scratch, but it needs pointers.
    partials = (
        (workspace.partial_out, workspace.partial_max, workspace.partial_sum)
        if num_splits > 1 and workspace is not None
        else (out, out, out)
    )
    tables = block_table, value_table
    inputs = (query, key_cache, value_cache, *tables, query_start_loc, seq_lens, skips)
    sink_logits = sinks if sinks is not None else seq_lens
    scalars = (
        sink_logits,
        softmax.scale * batch.key_scale * LOG2_E,
        batch.value_scale,
        soft_cap * LOG2_E,
        sliding_window,
        *out.stride()[:2],
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *(table.stride(0) for table in tables),
        head_stride,
    )
    switches = {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HAS_SOFT_CAP": soft_cap != 0,
        "HAS_WINDOW": sliding_window > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_LSE": log_sum_exp is not None,
        "HAS_VALUE_TABLE": own_values,
    }
    decode_kernel[(num_requests, num_kv_heads, num_splits)](
        out, *partials, lse, *inputs, *scalars, SPLITS=num_splits, **switches, **config
    )
    if num_splits > 1:
        combine_kernel[(num_requests, query.shape[1])](
            out,
            *partials,
            lse,
            query_start_loc,
            sink_logits,
            batch.value_scale,
            *out.stride()[:2],
            HEAD_SIZE=head_size,
            BLOCK_D=config["BLOCK_D"],
            SPLITS=num_splits,
            HAS_SINKS=sinks is not None,
            HAS_LSE=log_sum_exp is not None,
            num_warps=4,
        )
    if max_query_len > 1:
        config = prefill_config(head_size, element_size)
        tiles = triton.cdiv(max_query_len, config["BLOCK_M"])
        prefill_kernel[(tiles, query.shape[1], num_requests)](
            out, lse, *inputs, *scalars, **switches, **config
        )
