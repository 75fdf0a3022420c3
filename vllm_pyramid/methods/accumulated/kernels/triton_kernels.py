# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `add_key_mass`: the attention that the queries of a batch give each key.

Two passes over K. The first finds each row's maximum and sum, split over the context, and is left
out if attention has written the log-sum-exp. In the second a program owns a tile of keys,
multiplies it with all rows and adds up: the result does not depend on order.

A row is one query of one head: row `i` of a request and KV head is query `i // GROUP` of query head
`i % GROUP`. Local positions count from `skips[r]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    key_factors,
    load_keys,
    load_rows,
    visible_logits,
    with_sink,
    with_tile,
)
from vllm_pyramid.methods.accumulated.kernels.reference import BELOW

BELOW_AVERAGE_SHARE = tl.constexpr(BELOW)
# These may begin at any multiple of four bytes; one variant of a kernel serves all layers.
ROWS_OF_LARGER_TENSORS = [
    *("block_table", "query_start_loc", "seq_lens", "skips", "first_queries", "sinks")
]


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_LARGER_TENSORS)
def row_statistics_kernel(
    partial_max,
    partial_sum,
    query,
    key_cache,
    key_scales,
    block_table,
    query_start_loc,
    seq_lens,
    skips,
    first_queries,
    sinks,
    scale,
    soft_cap,
    sliding_window,
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
    SPLITS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Find the maximum and sum of each row over one split of the keys.

    `partial_*` are `[T, H, SPLITS]`, with the sink in the first split.

    Grid: request and KV head, tile of rows, split.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(2)
    start = tl.load(query_start_loc + r)
    num_queries = tl.load(query_start_loc + r + 1) - start
    num_rows = num_queries * GROUP
    row_start = tl.program_id(1) * ROWS
    if row_start >= num_rows:
        return
    skip = tl.load(skips + r)
    visible_keys = tl.load(seq_lens + r) - skip
    first_query = visible_keys - num_queries
    if HAS_FIRST:
        ignored = tl.load(first_queries + r) - (skip + first_query)
        # Clamp before multiplying: the largest int32 stands for "no query".
        ignored = tl.minimum(tl.maximum(ignored, 0), num_queries)
        if row_start + ROWS <= ignored * GROUP:  # no query of these rows adds anything
            return
    rows = row_start + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    q, tokens, heads = load_rows(
        query, start, rows, num_rows, g, stride_query_token, stride_query_head, dims, HEAD_SIZE,
        GROUP,
    )  # fmt: skip
    query_local = first_query + tl.minimum(rows, num_rows - 1) // GROUP
    first = 0  # the first key that the tile sees; earlier ones may belong to other requests
    if HAS_WINDOW:
        first = tl.maximum(first_query + row_start // GROUP - sliding_window + 1, 0)
    first_tile = first // BLOCK_K
    # The end of what the last row of this tile sees.
    last = tl.minimum(visible_keys, first_query + (row_start + ROWS - 1) // GROUP + 1)
    last_tile = tl.cdiv(tl.maximum(last, 0), BLOCK_K)
    tiles_each = tl.cdiv(tl.maximum(last_tile - first_tile, 0), SPLITS)
    begin = first_tile + split * tiles_each
    end = tl.minimum(begin + tiles_each, last_tile)

    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
    scale_base = key_scales + g.to(tl.int64) * stride_scale_head
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 (only the outer condition is known when compiling)
        if split == 0:
            running_max = tl.load(sinks + heads).to(tl.float32) * LOG2_E
            running_sum += 1.0
    for tile in range(begin, end):
        local = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = tl.minimum(tl.maximum(local, first), last - 1)
        k = load_keys(
            key_base, table_row, skip + inside, stride_key_block, stride_key_token,
            dims < HEAD_SIZE, BLOCK_SIZE,
        )  # fmt: skip
        factors = key_factors(
            scale, scale_base, table_row, skip + inside, stride_scale_block, stride_scale_token,
            BLOCK_SIZE, HAS_KEY_SCALES,
        )  # fmt: skip
        logits = visible_logits(
            q, k, local, query_local, visible_keys, factors, soft_cap, sliding_window,
            HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
        running_max, running_sum = with_tile(running_max, running_sum, logits)

    place = (tokens * (NUM_KV_HEADS * GROUP) + heads) * SPLITS + split
    tl.store(partial_max + place, running_max, mask=rows < num_rows)
    tl.store(partial_sum + place, running_sum, mask=rows < num_rows)


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_LARGER_TENSORS)
def key_mass_kernel(
    mass,
    partial_max,
    partial_sum,
    log_sum_exp,
    sinks,
    query,
    key_cache,
    key_scales,
    block_table,
    query_start_loc,
    seq_lens,
    skips,
    first_queries,
    scale,
    soft_cap,
    sliding_window,
    stride_mass_block,
    stride_mass_head,
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
    SPLITS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BELOW_AVERAGE: tl.constexpr,
):
    """Add what all rows give the keys of one tile. Grid: request and KV head, tile of keys.

    The softmax of a row comes from `log_sum_exp`, `[T, H]` without the sink (`HAS_LSE`), or from
    `partial_*`, which include the sink.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    start = tl.load(query_start_loc + r)
    num_queries = tl.load(query_start_loc + r + 1) - start
    skip = tl.load(skips + r)
    visible_keys = tl.load(seq_lens + r) - skip
    first_query = visible_keys - num_queries
    key_start = tl.program_id(1) * BLOCK_K
    first = 0  # the first key that a query sees; earlier ones may belong to other requests
    if HAS_WINDOW:
        first = tl.maximum(first_query - sliding_window + 1, 0)
    if (num_queries <= 0) | (key_start >= visible_keys) | (key_start + BLOCK_K <= first):
        return
    num_rows = num_queries * GROUP
    counted = 0  # the first row that counts
    if HAS_FIRST:
        counted = tl.load(first_queries + r) - (skip + first_query)
        counted = tl.minimum(tl.maximum(counted, 0), num_queries) * GROUP
        if counted >= num_rows:
            return
    local = key_start + tl.arange(0, BLOCK_K)
    inside = tl.minimum(tl.maximum(local, first), visible_keys - 1)
    dims = tl.arange(0, BLOCK_D)
    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
    scale_base = key_scales + g.to(tl.int64) * stride_scale_head
    k = load_keys(
        key_base, table_row, skip + inside, stride_key_block, stride_key_token, dims < HEAD_SIZE,
        BLOCK_SIZE,
    )  # fmt: skip
    factors = key_factors(
        scale, scale_base, table_row, skip + inside, stride_scale_block, stride_scale_token,
        BLOCK_SIZE, HAS_KEY_SCALES,
    )  # fmt: skip
    added = tl.zeros([BLOCK_K], tl.float32)
    splits = tl.arange(0, SPLITS)
    # Queries before this tile see none of it, nor do queries whose window begins behind it.
    first_row = tl.maximum(tl.maximum(key_start - first_query, 0) * GROUP, counted) // ROWS * ROWS
    if HAS_WINDOW:
        past = tl.maximum(key_start + BLOCK_K - 1 + sliding_window - first_query, 0)
        num_rows_here = tl.minimum(num_rows, past * GROUP)
    else:
        num_rows_here = num_rows
    for row_start in range(first_row, num_rows_here, ROWS):
        rows = row_start + tl.arange(0, ROWS)
        q, tokens, heads = load_rows(
            query, start, rows, num_rows, g, stride_query_token, stride_query_head, dims, HEAD_SIZE,
            GROUP,
        )  # fmt: skip
        query_local = first_query + tl.minimum(rows, num_rows - 1) // GROUP
        place = tokens * (NUM_KV_HEADS * GROUP) + heads
        if HAS_LSE:
            highest = tl.load(log_sum_exp + place) * LOG2_E
            sees = highest != float("-inf")  # NaN stays
            highest = tl.where(sees, highest, 0.0)
            total = tl.full([ROWS], 1.0, tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
                highest, total, _ = with_sink(highest, total, sink)
            total = tl.where(sees, total, 0.0)
        else:
            places = place[:, None] * SPLITS + splits[None, :]
            maxima = tl.load(partial_max + places)
            highest = tl.max(maxima, 1)
            highest = tl.where(highest == float("-inf"), 0.0, highest)
            total = tl.sum(tl.load(partial_sum + places) * tl.exp2(maxima - highest[:, None]), 1)
        # Rows of padding do not count, nor do rows that see no key, whose sum is 0; NaN does.
        counts = (rows >= counted) & (rows < num_rows) & (total != 0.0)
        factor = tl.where(counts, 1.0 / tl.where(counts, total, 1.0), 0.0)
        logits = visible_logits(
            q, k, local, query_local, visible_keys, factors, soft_cap, sliding_window,
            HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
        # Rows that do not count may have any numbers.
        given = tl.exp2(logits - highest[:, None]) * factor[:, None]
        given = tl.where(counts[:, None], given, 0.0)
        if BELOW_AVERAGE:
            seen = query_local + 1
            if HAS_WINDOW:
                seen = tl.minimum(seen, sliding_window)
            low = (
                (logits > float("-inf"))
                & (given * seen[:, None] < BELOW_AVERAGE_SHARE)
                & counts[:, None]
            )
            given = tl.where(low, 1.0, 0.0)
        added += tl.sum(given, 0)
    # Lanes without a key repeat the address of a visible one and are masked.
    blocks = tl.load(
        block_table + r.to(tl.int64) * stride_table + (skip + inside) // BLOCK_SIZE
    ).to(tl.int64)
    target = mass + blocks * stride_mass_block + g.to(tl.int64) * stride_mass_head
    target += (skip + inside) % BLOCK_SIZE
    mask = (local >= first) & (local < visible_keys)
    tl.store(target, tl.load(target, mask=mask, other=0.0) + added, mask=mask)
