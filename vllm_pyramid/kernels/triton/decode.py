# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of decode attention, split over the context.

Shape legend as in `records.py`; logits in base 2 as in `device_functions.py`.

Positions outside the visible range `[first, last)` of a tile are loaded from the nearest visible
position instead of being masked: the address then always belongs to the request, stale table
entries are never read, no garbage (which may be NaN) meets a zero weight, and the loads need no
predicate. Numbers of 8-bit float caches are converted to the query's dtype as they are loaded;
their scales are part of `scale` and `value_scale`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    dot,
    natural_log_sum,
    soft_capped,
    with_sink,
)

# A part of a batch may begin at any address in these tensors (one of them stands in for missing
# sinks), so no variant is compiled for their alignment.
OF_REQUESTS = ["block_table", "value_table", "query_start_loc", "seq_lens", "skips", "sinks"]


@triton.jit(do_not_specialize=["stride_head_table"], do_not_specialize_on_alignment=OF_REQUESTS)
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
    stride_head_table,
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
    """Attend for the new token of request `pid 0`, the heads of KV head `pid 1`, split `pid 2`.

    A split takes its share of the tiles of THIS request's visible range, so ragged lengths stay
    balanced. With one split the result goes to `out` (and `log_sum_exp`, `[T, H]`). With more, the
    unnormalised sum and its maximum go to `partial_*`, `[R, H, SPLITS]` (and D), without the sink,
    for `combine_kernel`. Requests with another number of queries than one are left alone.
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
    table_row += g.to(tl.int64) * stride_head_table
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
        # Only a request that sees no key at all has a tile without a visible key.
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
        # The sum is zero only if nothing is visible.
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
        # `combine_kernel` does not read the sums of empty splits.
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
    # Empty splits hold -inf and 0; if all are empty, their weights must not become NaN.
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
