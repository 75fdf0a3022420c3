# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of paged attention: decode split over the context, and causal prefill.

Shape legend as in `records.py`. Logits are kept in base 2 (`exp2` is one instruction), so the
softmax scale and the soft cap arrive multiplied by log2(e).

Rows outside the visible range `[first, last)` of a tile are loaded from the nearest visible row
instead of being masked: the address is then always one that belongs to the request, stale table
entries are never read, no garbage (which may be NaN) meets a zero weight, and the loads need no
predicate. Caches of 8-bit floats become numbers of the query's dtype as they are loaded; what they
are to be multiplied with comes in with `scale`, and with `value_scale`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# A part of a batch begins anywhere in these tensors (one of them stands for sinks that are not).
OF_REQUESTS = ["block_table", "value_table", "query_start_loc", "seq_lens", "skips", "sinks"]


@triton.jit
def dot(a, b):
    """Matrix product with float32 sums; exact products for 16-bit inputs, IEEE ones for float32.

    `b` may have numbers of fewer bits than `a`, which are those of its type too.
    """
    if INTERPRETED:
        # Triton's interpreter keeps bfloat16 as integers and would multiply their bit patterns.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def soft_capped(logits, soft_cap):
    """`soft_cap * tanh(logits / soft_cap)`; by `exp`, which every back end of Triton has."""
    ratio = tl.exp(-2.0 * tl.abs(logits) / soft_cap)
    magnitude = soft_cap * (1.0 - ratio) / (1.0 + ratio)
    return tl.where(logits < 0, -magnitude, magnitude)


@triton.jit
def with_sink(maximum, total, sink):
    """A softmax so far (total * 2**maximum) and one more key without a value: the maximum and total
    with it, and the factor for what was summed before."""
    new_max = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_max)
    return new_max, total * shrink + tl.exp2(sink - new_max), shrink


@triton.jit
def natural_log_sum(maximum, total):
    """ln(total * 2**maximum); -inf where nothing was summed."""
    log = maximum / LOG2_E + tl.log(tl.where(total == 0.0, 1.0, total))
    return tl.where(total == 0.0, float("-inf"), log)


@triton.jit(do_not_specialize_on_alignment=OF_REQUESTS)
def decode_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    log_sum_exp,
    query,
    key_cache,
    value_cache,
    block_table,
    value_table,
    query_start_loc,
    seq_lens,
    skips,
    sinks,
    scale,
    value_scale,
    soft_cap,
    sliding_window,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_value_block,
    stride_value_head,
    stride_value_token,
    stride_table,
    stride_value_table,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_VALUE_TABLE: tl.constexpr,
):
    """One new token of request `pid 0`, the query heads of KV head `pid 1`, split `pid 2`.

    The split takes its share of the tiles of THIS request's visible range, so ragged lengths stay
    balanced. With one split the result goes to `out` (and `log_sum_exp`, `[T, H]`), else the
    unnormalised sum and its maximum go to `partial_*`, `[R, H, SPLITS]` (and D), without the sink,
    for `combine_kernel`.
    """
    r = tl.program_id(0)
    g = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_loc + r)
    if tl.load(query_start_loc + r + 1) - token != 1:
        return
    last = tl.load(seq_lens + r)
    first = tl.load(skips + r)
    if HAS_WINDOW:
        first = tl.maximum(first, last - sliding_window)
    first_tile = first // BLOCK_K
    last_tile = tl.cdiv(last, BLOCK_K)
    tiles_each = tl.cdiv(last_tile - first_tile, SPLITS)
    begin = first_tile + split * tiles_each
    end = tl.minimum(begin + tiles_each, last_tile)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    heads = (g * GROUP + tl.minimum(rows, GROUP - 1)).to(tl.int64)
    dim_mask = dims < HEAD_SIZE
    q = tl.load(
        query
        + token.to(tl.int64) * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=dim_mask[None, :],
        other=0.0,
    )
    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
    value_base = value_cache + g.to(tl.int64) * stride_value_head + dims[None, :]
    value_row = value_table + r.to(tl.int64) * stride_value_table

    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    for tile in range(begin, end):
        positions = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        visible = (positions >= first) & (positions < last)
        positions = tl.minimum(tl.maximum(positions, first), last - 1)
        blocks = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
        in_block = (positions % BLOCK_SIZE).to(tl.int64)
        k = tl.load(
            key_base + (blocks * stride_key_block + in_block * stride_key_token)[:, None],
            mask=dim_mask[None, :],
            other=0.0,
        ).to(q.dtype)
        if HAS_VALUE_TABLE:
            blocks = tl.load(value_row + positions // BLOCK_SIZE).to(tl.int64)
        v = tl.load(
            value_base + (blocks * stride_value_block + in_block * stride_value_token)[:, None],
            mask=dim_mask[None, :],
            other=0.0,
        ).to(q.dtype)
        logits = dot(q, tl.trans(k))
        logits *= scale
        if HAS_SOFT_CAP:
            logits = soft_capped(logits, soft_cap)
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        # Only a request that sees nothing at all has a tile without a visible key.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - reference_max[:, None])
        shrink = tl.exp2(running_max - reference_max)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
        running_max = new_max

    row_mask = rows < GROUP
    store_mask = row_mask[:, None] & dim_mask[None, :]
    num_heads = tl.num_programs(1) * GROUP
    if SPLITS == 1:
        if HAS_LSE:
            lse = natural_log_sum(running_max, running_sum)
            tl.store(log_sum_exp + token.to(tl.int64) * num_heads + heads, lse, mask=row_mask)
        if HAS_SINKS:
            sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
            _, running_sum, shrink = with_sink(running_max, running_sum, sink)
            acc *= shrink[:, None]
        # Zero only where nothing is visible.
        acc = acc * value_scale / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        tl.store(
            out
            + token.to(tl.int64) * stride_out_token
            + heads[:, None] * stride_out_head
            + dims[None, :],
            acc.to(out.dtype.element_ty),
            mask=store_mask,
        )
    else:
        place = (r.to(tl.int64) * num_heads + heads) * SPLITS + split
        tl.store(partial_max + place, running_max, mask=row_mask)
        tl.store(partial_sum + place, running_sum, mask=row_mask)
        # `combine_kernel` reads no sums of empty splits.
        if begin < end:
            tl.store(partial_out + place[:, None] * HEAD_SIZE + dims[None, :], acc, mask=store_mask)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc", "sinks"])
def combine_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    log_sum_exp,
    query_start_loc,
    sinks,
    value_scale,
    stride_out_token,
    stride_out_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Join the splits of request `pid 0`, query head `pid 1`, and add the sink."""
    r = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + r)
    if tl.load(query_start_loc + r + 1) - token != 1:
        return
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_SIZE
    place = (r.to(tl.int64) * tl.num_programs(1) + head) * SPLITS + splits
    maxima = tl.load(partial_max + place)
    highest = tl.max(maxima, 0)
    # Empty splits hold -inf and 0; where all are empty their weight must not become NaN.
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(partial_sum + place) * weights, 0)
    parts = tl.load(
        partial_out + place[:, None] * HEAD_SIZE + dims[None, :],
        mask=(weights > 0.0)[:, None] & dim_mask[None, :],
        other=0.0,
    )
    if HAS_LSE:
        lse_place = token.to(tl.int64) * tl.num_programs(1) + head
        tl.store(log_sum_exp + lse_place, natural_log_sum(highest, total))
    result = tl.sum(parts * weights[:, None], 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        _, total, shrink = with_sink(highest, total, sink)
        result *= shrink
    result = result * value_scale / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head + dims,
        result.to(out.dtype.element_ty),
        mask=dim_mask,
    )


@triton.jit(do_not_specialize_on_alignment=OF_REQUESTS)
def prefill_kernel(
    out,
    log_sum_exp,
    query,
    key_cache,
    value_cache,
    block_table,
    value_table,
    query_start_loc,
    seq_lens,
    skips,
    sinks,
    scale,
    value_scale,
    soft_cap,
    sliding_window,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_value_block,
    stride_value_head,
    stride_value_token,
    stride_table,
    stride_value_table,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_VALUE_TABLE: tl.constexpr,
):
    """`BLOCK_M` queries (tile `pid 0`, the last tiles first) of request `pid 2`, head `pid 1`.

    Requests with one query belong to `decode_kernel`, so that a request's decode arithmetic does
    not depend on whether a prefill shares its step.
    """
    head = tl.program_id(1).to(tl.int64)
    r = tl.program_id(2)
    start = tl.load(query_start_loc + r)
    num_queries = tl.load(query_start_loc + r + 1) - start
    # The tiles that see the longest context start first, so the launch does not end on them.
    row_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if (num_queries <= 1) | (row_start >= num_queries):
        return
    seq_len = tl.load(seq_lens + r)
    first_query = seq_len - num_queries
    first = tl.load(skips + r)
    if HAS_WINDOW:
        first = tl.maximum(first, first_query + row_start - sliding_window + 1)
    last = tl.minimum(seq_len, first_query + row_start + BLOCK_M)

    rows = tl.minimum(row_start + tl.arange(0, BLOCK_M), num_queries - 1)
    query_positions = first_query + rows
    tokens = (start + rows).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_SIZE
    q = tl.load(
        query + tokens[:, None] * stride_query_token + head * stride_query_head + dims[None, :],
        mask=dim_mask[None, :],
        other=0.0,
    )
    g = head // GROUP
    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g * stride_key_head + dims[None, :]
    value_base = value_cache + g * stride_value_head + dims[None, :]
    value_row = value_table + r.to(tl.int64) * stride_value_table

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for tile in range(first // BLOCK_K, tl.cdiv(last, BLOCK_K)):
        positions = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        visible = (positions >= first)[None, :] & (positions[None, :] <= query_positions[:, None])
        if HAS_WINDOW:
            visible &= positions[None, :] > query_positions[:, None] - sliding_window
        positions = tl.minimum(tl.maximum(positions, first), last - 1)
        blocks = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
        in_block = (positions % BLOCK_SIZE).to(tl.int64)
        k = tl.load(
            key_base + (blocks * stride_key_block + in_block * stride_key_token)[:, None],
            mask=dim_mask[None, :],
            other=0.0,
        ).to(q.dtype)
        logits = dot(q, tl.trans(k))
        logits *= scale
        if HAS_SOFT_CAP:
            logits = soft_capped(logits, soft_cap)
        logits = tl.where(visible, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        # A row may see nothing of this tile, nor of those before it.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - reference_max[:, None])
        shrink = tl.exp2(running_max - reference_max)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        if HAS_VALUE_TABLE:
            blocks = tl.load(value_row + positions // BLOCK_SIZE).to(tl.int64)
        v = tl.load(
            value_base + (blocks * stride_value_block + in_block * stride_value_token)[:, None],
            mask=dim_mask[None, :],
            other=0.0,
        ).to(q.dtype)
        acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
        running_max = new_max

    inside = row_start + tl.arange(0, BLOCK_M) < num_queries
    if HAS_LSE:
        # Rows behind the last repeat it.
        lse = natural_log_sum(running_max, running_sum)
        tl.store(log_sum_exp + tokens * tl.num_programs(1) + head, lse, mask=inside)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        _, running_sum, shrink = with_sink(running_max, running_sum, sink)
        acc *= shrink[:, None]
    acc = acc * value_scale / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    tl.store(
        out + tokens[:, None] * stride_out_token + head * stride_out_head + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & dim_mask[None, :],
    )
