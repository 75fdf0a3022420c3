# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for V in host memory: logits of all keys, the best of each row, and their V.

`choosers` is `[S, 2]` int32, the request of each and the query's index within that request. Each
query head of a chooser is a row of the logits `[S, H, columns]`, whose columns count from
`skips[r]`. `topn_values_kernel` alone reads V, a row at a time, so V may be in host memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    load_keys,
    load_rows,
    visible_logits,
)
from vllm_pyramid.kernels.triton.select import add_digit, ordered_bits

# A part of a batch may begin at any address in these tensors.
OF_CHOOSERS = ["block_table", "query_start_loc", "seq_lens", "skips", "choosers", "top_ns"]


@triton.jit
def sight_of(choosers, s, query_start_loc, seq_lens, skips, sliding_window, HAS_WINDOW):
    """Return request, query row and skip of chooser s, and the columns it sees: first, end."""
    r = tl.load(choosers + 2 * s)
    start = tl.load(query_start_loc + r)
    num_queries = tl.load(query_start_loc + r + 1) - start
    i = tl.load(choosers + 2 * s + 1)
    skip = tl.load(skips + r)
    end = tl.load(seq_lens + r) - skip - num_queries + i + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(end - sliding_window, 0)
    return r, start + i, skip, first, end


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=OF_CHOOSERS)
def topn_logits_kernel(
    logits,
    query,
    key_cache,
    block_table,
    query_start_loc,
    seq_lens,
    skips,
    choosers,
    scale,
    soft_cap,
    sliding_window,
    num_columns,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Compute the base-2 logits of one tile of keys. Grid: chooser and KV head, tile."""
    s = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    r, token, skip, first, end = sight_of(
        choosers, s, query_start_loc, seq_lens, skips, sliding_window, HAS_WINDOW
    )
    key_start = tl.program_id(1) * BLOCK_K
    if (key_start >= end) | (key_start + BLOCK_K <= first):
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    q, _, heads = load_rows(
        query, token, rows, GROUP, g, stride_query_token, stride_query_head, dims, HEAD_SIZE, GROUP
    )
    local = key_start + tl.arange(0, BLOCK_K)
    inside = tl.minimum(tl.maximum(local, first), end - 1)
    k = load_keys(
        key_cache + g.to(tl.int64) * stride_key_head + dims[None, :],
        block_table + r.to(tl.int64) * stride_table,
        skip + inside,
        stride_key_block,
        stride_key_token,
        dims < HEAD_SIZE,
        BLOCK_SIZE,
    )
    query_local = tl.zeros([ROWS], tl.int32) + end - 1
    tile = visible_logits(
        q, k, local, query_local, end, scale, soft_cap, sliding_window, HAS_SOFT_CAP, HAS_WINDOW
    )
    place = (s.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_columns
    tl.store(
        logits + place[:, None] + local[None, :],
        tile,
        mask=(rows < GROUP)[:, None] & (local < num_columns)[None, :],
    )


@triton.jit(
    do_not_specialize=["num_columns", "max_top_n"],
    do_not_specialize_on_alignment=["sinks", *OF_CHOOSERS[1:]],
)
def topn_choose_kernel(
    best,
    weights,
    totals,
    logits,
    query_start_loc,
    seq_lens,
    skips,
    top_ns,
    choosers,
    sinks,
    sliding_window,
    num_columns,
    max_top_n,
    NUM_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Find the best columns of one row (ascending), their weights, and the divisor of these.

    `best` and `weights` are `[S, H, max_top_n]`, `totals` (the divisors) `[S, H]`. Grid: row. The
    search is that of `select_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    s = tl.program_id(0) // NUM_HEADS
    r, _, _, first, end = sight_of(
        choosers, s, query_start_loc, seq_lens, skips, sliding_window, HAS_WINDOW
    )
    source = logits + row * num_columns
    offsets, bins = tl.arange(0, BLOCK), tl.arange(0, 256)

    top = tl.full([], float("-inf"), tl.float32)
    for start in range(first, end, BLOCK):
        columns = start + offsets
        tile = tl.load(source + columns, mask=columns < end, other=float("-inf"))
        top = tl.maximum(top, tl.max(tile, 0))
    total = tl.full([], 0.0, tl.float32)
    if HAS_SINKS and not RENORMALIZE:
        sink = tl.load(sinks + tl.program_id(0) % NUM_HEADS).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        total += tl.exp2(sink - top)

    # `wanted` counts the columns still to be found among the logits that share the prefix.
    wanted = tl.minimum(tl.load(top_ns + r), end - first)
    prefix = tl.full([], 0, tl.uint32)
    for i in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(first, end, BLOCK):
            columns = start + offsets
            inside = columns < end
            tile = tl.load(source + columns, mask=inside, other=float("-inf"))
            if i == 0 and not RENORMALIZE:
                total += tl.sum(tl.exp2(tile - top), 0)
            bits = ordered_bits(tile, columns, 0)
            if i > 0:
                inside &= (bits >> (32 - 8 * i)) == prefix
            digits = ((bits >> (24 - 8 * i)) & 0xFF).to(tl.int32)
            counts += tl.histogram(digits, 256, mask=inside)
        prefix, wanted = add_digit(counts, bins, prefix, wanted)

    taken = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(first, end, BLOCK):
        columns = start + offsets
        inside = columns < end
        tile = tl.load(source + columns, mask=inside, other=float("-inf"))
        bits = ordered_bits(tile, columns, 0)
        equal = (inside & (bits == prefix)).to(tl.int32)
        equal_rank = equal_before + tl.cumsum(equal, 0) - equal
        chosen = inside & ((bits > prefix) | ((equal == 1) & (equal_rank < wanted)))
        ones = chosen.to(tl.int32)
        place = row * max_top_n + taken + tl.cumsum(ones, 0) - ones
        weight = tl.where(chosen, tl.exp2(tile - top), 0.0)
        tl.store(best + place, columns, mask=chosen)
        tl.store(weights + place, weight, mask=chosen)
        if RENORMALIZE:
            total += tl.sum(weight, 0)
        taken += tl.sum(ones, 0)
        equal_before += tl.sum(equal, 0)
    tl.store(totals + row, total)


@triton.jit(do_not_specialize=["max_top_n"], do_not_specialize_on_alignment=OF_CHOOSERS)
def topn_values_kernel(
    out,
    best,
    weights,
    totals,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    skips,
    top_ns,
    choosers,
    value_scale,
    sliding_window,
    max_top_n,
    stride_out_token,
    stride_out_head,
    stride_value_block,
    stride_value_head,
    stride_value_token,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Sum the chosen rows of V by their weights. Grid: chooser and query head."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.program_id(0) // NUM_HEADS
    head = tl.program_id(0) % NUM_HEADS
    r, token, skip, first, end = sight_of(
        choosers, s, query_start_loc, seq_lens, skips, sliding_window, HAS_WINDOW
    )
    count = tl.maximum(tl.minimum(tl.load(top_ns + r), end - first), 0)
    table_row = block_table + r.to(tl.int64) * stride_table
    dims = tl.arange(0, BLOCK_D)
    base = value_cache + (head // GROUP).to(tl.int64) * stride_value_head + dims[None, :]
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        inside = index < count
        positions = skip + tl.load(best + row * max_top_n + index, mask=inside, other=0)
        weight = tl.load(weights + row * max_top_n + index, mask=inside, other=0.0)
        blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        in_block = (positions % BLOCK_SIZE).to(tl.int64)
        v = tl.load(
            base + (blocks * stride_value_block + in_block * stride_value_token)[:, None],
            mask=inside[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )
        total += tl.sum(weight[:, None] * v.to(tl.float32), 0)
    divisor = tl.load(totals + row)
    # Only a row that sees no key divides by zero; NaN stays.
    total = tl.where(
        divisor == 0.0, 0.0, total * value_scale / tl.where(divisor == 0.0, 1.0, divisor)
    )
    target = out + token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head
    tl.store(target + dims, total.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


@triton.jit(do_not_specialize_on_alignment=["block_table", "places"])
def copy_pages_kernel(
    target, source, block_table, places, page_words, stride_table, BLOCK: tl.constexpr
):
    """Copy `BLOCK` words of one page. Grid: place, piece of the page."""
    place = places + 3 * tl.program_id(0)
    entry = tl.load(place + 1).to(tl.int64) * stride_table + tl.load(place + 2)
    to = tl.load(place).to(tl.int64) * page_words
    start = tl.load(block_table + entry).to(tl.int64) * page_words
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = words < page_words
    tl.store(target + to + words, tl.load(source + start + words, mask=mask), mask=mask)
