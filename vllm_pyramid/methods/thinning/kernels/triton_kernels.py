# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `recent_mass`: the attention that recent queries pay to each context key.

Two passes over K. The first finds each query's log-sum-exp, and is left out if attention has
written it. In the second a program owns a tile of context keys, multiplies it with all recent
queries and adds up their weighted probabilities: every number has one writer.

A row is one query of one head: row `i` of a request and KV head is its recent query `i // GROUP` of
query head `i % GROUP`. Local positions count from `skips[r]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    key_factors,
    load_keys,
    load_rows,
    natural_log_sum,
    visible_logits,
    with_sink,
    with_tile,
)

# A part of a batch may begin at any address in these tensors.
OF_REQUESTS = [*("block_table", "query_ends", "seq_lens", "skips", "recents")]


@triton.jit(do_not_specialize_on_alignment=OF_REQUESTS)
def recent_log_sum_exp_kernel(
    log_sum_exp,
    query,
    key_cache,
    key_scales,
    block_table,
    query_ends,
    seq_lens,
    skips,
    recents,
    scale,
    soft_cap,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Find the natural log-sum-exp `[T, H]`, without sinks.

    Grid: request and KV head, tile of rows.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    recent = tl.load(recents + r)
    row_start = tl.program_id(1) * ROWS
    if row_start >= recent * GROUP:
        return
    skip = tl.load(skips + r)
    visible = tl.load(seq_lens + r) - skip
    rows, dims = row_start + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_SIZE
    start = tl.load(query_ends + r) - recent
    q, tokens, heads = load_rows(
        query, start, rows, recent * GROUP, g, stride_query_token, stride_query_head, dims,
        HEAD_SIZE, GROUP,
    )  # fmt: skip
    first_query = visible - recent
    query_local = first_query + tl.minimum(rows // GROUP, recent - 1)
    last = tl.minimum(visible, first_query + (row_start + ROWS - 1) // GROUP + 1)
    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
    scale_base = key_scales + g.to(tl.int64) * stride_scale_head
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    for key_start in range(0, last, BLOCK_K):
        local = key_start + tl.arange(0, BLOCK_K)
        places = skip + tl.minimum(local, visible - 1)
        k = load_keys(
            key_base, table_row, places, stride_key_block, stride_key_token, dim_mask, BLOCK_SIZE
        )
        factors = key_factors(
            scale, scale_base, table_row, places, stride_scale_block, stride_scale_token,
            BLOCK_SIZE, HAS_KEY_SCALES,
        )  # fmt: skip
        logits = visible_logits(
            q, k, local, query_local, visible, factors, soft_cap, 0, HAS_SOFT_CAP, False
        )
        running_max, running_sum = with_tile(running_max, running_sum, logits)
    lse = natural_log_sum(running_max, running_sum)
    place = tokens * (NUM_KV_HEADS * GROUP) + heads
    tl.store(log_sum_exp + place, lse, mask=rows < recent * GROUP)


@triton.jit(
    do_not_specialize=["num_columns"],
    do_not_specialize_on_alignment=[*OF_REQUESTS, "contexts", "sinks"],
)
def recent_mass_kernel(
    mass,
    log_sum_exp,
    sinks,
    query,
    key_cache,
    key_scales,
    block_table,
    query_ends,
    seq_lens,
    skips,
    recents,
    contexts,
    scale,
    soft_cap,
    distance_weight,
    num_columns,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Sum the weighted probabilities of a tile of keys into `mass`, `[R, G, num_columns]`.

    Columns behind the context become 0. Grid: request and KV head, tile of keys.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    context = tl.load(contexts + r)
    total = tl.zeros([BLOCK_K], tl.float32)
    if tl.program_id(1) * BLOCK_K < context:
        recent = tl.load(recents + r)
        skip = tl.load(skips + r)
        visible = tl.load(seq_lens + r) - skip
        first_query = visible - recent
        dims = tl.arange(0, BLOCK_D)
        local = first_query - context + tl.minimum(columns, context - 1)
        table_row = block_table + r.to(tl.int64) * stride_table
        key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
        scale_base = key_scales + g.to(tl.int64) * stride_scale_head
        k = load_keys(
            key_base, table_row, skip + local, stride_key_block, stride_key_token, dims < HEAD_SIZE,
            BLOCK_SIZE,
        )  # fmt: skip
        factors = key_factors(
            scale, scale_base, table_row, skip + local, stride_scale_block, stride_scale_token,
            BLOCK_SIZE, HAS_KEY_SCALES,
        )  # fmt: skip
        start = tl.load(query_ends + r) - recent
        # Weights rise from 1 at the first recent query to `distance_weight` at the last.
        rise = (distance_weight - 1.0) / tl.maximum(recent - 1, 1)
        all_weights = recent + rise * (recent * 1.0) * (recent - 1) / 2
        for row_start in range(0, recent * GROUP, ROWS):
            rows = row_start + tl.arange(0, ROWS)
            q, tokens, heads = load_rows(
                query, start, rows, recent * GROUP, g, stride_query_token, stride_query_head,
                dims, HEAD_SIZE, GROUP,
            )  # fmt: skip
            lse = tl.load(log_sum_exp + tokens * (NUM_KV_HEADS * GROUP) + heads) * LOG2_E
            if HAS_SINKS:
                sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
                highest, sum_of_all, _ = with_sink(lse, 1.0, sink)
                lse = highest + tl.log2(sum_of_all)
            # The context lies before all recent queries, so each sees all of it.
            logits = visible_logits(
                q, k, local, tl.zeros_like(rows) + visible, visible, factors, soft_cap, 0,
                HAS_SOFT_CAP, False,
            )  # fmt: skip
            weights = 1.0 + rise * (rows // GROUP)
            weights = tl.where(rows < recent * GROUP, weights / all_weights, 0.0)
            total += tl.sum(tl.exp2(logits - lse[:, None]) * weights[:, None], 0)
        total = tl.where(columns < context, total, 0.0)
    row = tl.program_id(0).to(tl.int64) * num_columns
    tl.store(mass + row + columns, total, mask=columns < num_columns)
