# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of page selection: summaries of pages, their scores, and lists of the best.

Letters as in `records.py`: a row of a selection is a query token, and its columns are the
pages that it sees, counted from the first. Logits are in base 2 as in `device_functions.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import LOG2_E, dot, soft_capped, with_sink
from vllm_pyramid.kernels.triton.select import kth_largest, next_chosen

# A part of a batch may begin at any address in these tensors.
OF_REQUESTS = ["block_table", "starts", "seq_lens", "skips"]
OF_ROWS = ["block_table", "requests", "positions", "skips"]


@triton.jit(do_not_specialize_on_alignment=OF_REQUESTS)
def summarise_pages_kernel(
    summaries,
    key_cache,
    block_table,
    starts,
    seq_lens,
    skips,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_summary_block,
    stride_summary_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    KIND: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Summarise one page for one KV head. Grid: request and KV head, page from the first new."""
    r = tl.program_id(0) // NUM_KV_HEADS
    g = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    start, length, skip = tl.load(starts + r), tl.load(seq_lens + r), tl.load(skips + r)
    first = tl.maximum(start, skip)
    page = first // BLOCK_SIZE + tl.program_id(1)
    if (first >= length) | (page * BLOCK_SIZE >= length):
        return
    block = tl.load(block_table + r.to(tl.int64) * stride_table + page).to(tl.int64)
    offsets, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    positions = page * BLOCK_SIZE + offsets
    inside = (offsets < BLOCK_SIZE) & (positions >= skip) & (positions < length)
    mask = inside[:, None] & (dims < HEAD_SIZE)[None, :]
    source = key_cache + block * stride_key_block + g * stride_key_head + dims[None, :]
    k = tl.load(source + (offsets * stride_key_token)[:, None], mask=mask, other=0.0)
    k = k.to(tl.float32)
    target = summaries + block * stride_summary_block + g * stride_summary_head + dims
    if KIND == "box":
        one = tl.max(tl.where(mask, k, float("-inf")), 0)
        two = tl.min(tl.where(mask, k, float("inf")), 0)
    else:
        count = tl.sum(inside.to(tl.float32), 0)
        one = tl.sum(k, 0) / count
        apart = tl.where(mask, k - one[None, :], 0.0)
        two = tl.sqrt(tl.sum(apart * apart, 0) / count)
    dtype = summaries.dtype.element_ty
    tl.store(target, one.to(dtype), mask=dims < HEAD_SIZE)
    tl.store(target + HEAD_SIZE, two.to(dtype), mask=dims < HEAD_SIZE)


@triton.jit
def pages_seen(positions, skips, s, BLOCK_SIZE):
    """Return the first page that row s sees, how many it sees, and tokens hidden at its start."""
    skip = tl.load(skips + s)
    first = skip // BLOCK_SIZE
    return first, tl.load(positions + s) // BLOCK_SIZE - first + 1, skip % BLOCK_SIZE


@triton.jit(do_not_specialize=["num_columns", "num_rows"], do_not_specialize_on_alignment=OF_ROWS)
def page_logits_kernel(
    logits,
    query,
    pool,
    block_table,
    requests,
    positions,
    skips,
    scale,
    soft_cap,
    num_columns,
    num_rows,
    stride_query_token,
    stride_query_head,
    stride_pool_block,
    stride_pool_head,
    stride_pool_row,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Compute `logits[s, h, page]`, `[S, H, num_columns]`. Grid: row and KV head, tile of pages.

    Pages have `num_rows` rows in the pool, of which the largest product counts. `IN_FLOAT32` is for
    a pool whose numbers the query's dtype does not hold.
    """
    s = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    first, visible, _ = pages_seen(positions, skips, s, BLOCK_SIZE)
    candidates = visible - 1
    begin = tl.program_id(1) * BLOCK_P
    if begin >= candidates:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    dim_mask = (dims < HEAD_SIZE)[None, :]
    heads = (g * GROUP + tl.minimum(rows, GROUP - 1)).to(tl.int64)
    q = tl.load(
        query
        + s.to(tl.int64) * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=dim_mask,
        other=0.0,
    )
    if IN_FLOAT32:
        q = q.to(tl.float32)
    # The second half of the query, exact in its dtype; the interpreter compares no bfloat16.
    numbers = q.to(tl.float32)
    second = q
    if KIND == "box":
        second = tl.minimum(numbers, 0.0).to(q.dtype)
        q = tl.maximum(numbers, 0.0).to(q.dtype)
    elif KIND == "spread":
        second = tl.abs(numbers).to(q.dtype)
    columns = begin + tl.arange(0, BLOCK_P)
    # Pages behind the last are loaded from it: their blocks belong to the request.
    pages = first + tl.minimum(columns, candidates - 1)
    table_row = block_table + tl.load(requests + s).to(tl.int64) * stride_table
    blocks = tl.load(table_row + pages).to(tl.int64)
    entries = pool + g.to(tl.int64) * stride_pool_head + dims[None, :]
    entries += (blocks * stride_pool_block)[:, None]
    best = tl.full([ROWS, BLOCK_P], float("-inf"), tl.float32)
    for i in range(num_rows):
        k = tl.load(entries + i * stride_pool_row, mask=dim_mask, other=0.0).to(q.dtype)
        products = dot(q, tl.trans(k))
        if KIND != "rows":
            k = tl.load(entries + HEAD_SIZE, mask=dim_mask, other=0.0).to(q.dtype)
            products += dot(second, tl.trans(k))
        best = tl.maximum(best, products)
    best *= scale
    if HAS_SOFT_CAP:
        best = soft_capped(best, soft_cap)
    place = (s.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_columns
    tl.store(
        logits + place[:, None] + columns[None, :],
        best,
        mask=(rows < GROUP)[:, None] & (columns < candidates)[None, :],
    )


@triton.jit(
    do_not_specialize=["num_columns", "out_columns"],
    do_not_specialize_on_alignment=["sinks", "positions", "skips"],
)
def page_weights_kernel(
    out,
    logits,
    positions,
    skips,
    sinks,
    num_columns,
    out_columns,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Take the softmax over each head's candidates, and combine the heads. Grid: row, KV head."""
    s = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    _, visible, _ = pages_seen(positions, skips, s, BLOCK_SIZE)
    candidates = visible - 1
    rows, offsets = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = (rows < GROUP)[:, None]
    heads = (g * GROUP + tl.minimum(rows, GROUP - 1)).to(tl.int64)
    source = logits + ((s.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_columns)[:, None]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, candidates, BLOCK):
        columns = (begin + offsets)[None, :]
        tile = tl.load(source + columns, mask=columns < candidates, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tile, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(tile - new_top[:, None]), 1)
        top = new_top
    if HAS_SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        before = top
        top, total, _ = with_sink(before, total, sink)
    target = out + tl.program_id(0).to(tl.int64) * out_columns
    for begin in range(0, out_columns, BLOCK):
        column = begin + offsets
        seen = (column < candidates)[None, :]
        tile = tl.load(source + column[None, :], mask=seen, other=float("-inf"))
        weights = tl.exp2(tile - top[:, None]) / total[:, None]
        weights = tl.where(real & seen, weights, 0.0)
        combined = tl.max(weights, 0) if LARGEST else tl.sum(weights, 0) / GROUP
        combined = tl.where(column < candidates, combined, float("-inf"))
        tl.store(target + column, combined, mask=column < out_columns)


@triton.jit(
    do_not_specialize=["num_sinks", "num_recent", "width", "stride_scores_row"],
    do_not_specialize_on_alignment=[*OF_ROWS, "budgets"],
)
def select_pages_kernel(
    blocks_out,
    pages_out,
    counts,
    lens_out,
    hidden_out,
    scores,
    block_table,
    requests,
    positions,
    skips,
    budgets,
    num_sinks,
    num_recent,
    width,
    stride_scores_row,
    stride_scores_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write the list of one row and KV head; the first KV head writes the row's numbers.

    The search is that of `select_kernel`, over the pages before the last `num_recent`.
    """
    s = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    first, visible, hidden = pages_seen(positions, skips, s, BLOCK_SIZE)
    always = tl.maximum(num_sinks, (hidden > 0).to(tl.int32))
    recent = tl.minimum(num_recent, visible)
    count = tl.minimum(visible, tl.maximum(tl.load(budgets + s), always + num_recent))
    candidates = visible - recent
    row = scores + s.to(tl.int64) * stride_scores_row + g.to(tl.int64) * stride_scores_head
    table_row = block_table + tl.load(requests + s).to(tl.int64) * stride_table + first
    pages_at = pages_out + tl.program_id(0).to(tl.int64) * width
    blocks_at = blocks_out + tl.program_id(0).to(tl.int64) * width
    offsets = tl.arange(0, BLOCK)

    prefix, wanted = kth_largest(row, candidates, always, count - recent, BLOCK)
    taken = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for begin in range(0, candidates, BLOCK):
        columns = begin + offsets
        chosen, place, taken, equal_before = next_chosen(
            row, columns, candidates, always, prefix, wanted, taken, equal_before
        )
        chosen &= place < width
        tl.store(pages_at + place, first + columns, mask=chosen)
        tl.store(blocks_at + place, tl.load(table_row + columns, mask=chosen, other=0), mask=chosen)

    for begin in range(count - recent, width, BLOCK):
        place = begin + offsets
        listed = (place < count) & (place < width)
        column = visible - count + place
        blocks = tl.load(table_row + column, mask=listed, other=0)
        inside = place < width
        tl.store(pages_at + place, tl.where(listed, first + column, -1), mask=inside)
        tl.store(blocks_at + place, blocks, mask=inside)
    if g == 0:
        tl.store(counts + s, count)
        own = tl.load(positions + s) % BLOCK_SIZE + 1
        tl.store(lens_out + s, (count - 1) * BLOCK_SIZE + own)
        tl.store(hidden_out + s, hidden)
