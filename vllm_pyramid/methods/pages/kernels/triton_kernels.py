# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of page selection: scores of pages, and lists of the best.

Letters as in `records.py`: a row of a selection is a query token, and its columns are the
pages that it sees, counted from the first. Logits are in base 2 as in `device_functions.py`.

Grids are sized by what the host knows when it launches, or a graph when it is captured. Each
program loops over pages that its row sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import LOG2_E, dot, soft_capped, with_sink
from vllm_pyramid.kernels.triton.select import kth_largest, next_chosen
from vllm_pyramid.methods.pages.kernels.triton_summaries import summarise_page

# A part of a batch may begin at any address in these tensors.
OF_ROWS = ["block_table", "requests", "positions", "skips"]
OF_LISTS = ["names_out", "lens_out", "head_lens", "hidden_out", "unranked", "miscounted"]


@triton.jit
def pages_seen(positions, skips, s, BLOCK_SIZE):
    """Return the first page that row s sees, how many it sees, and tokens hidden at its start."""
    skip = tl.load(skips + s)
    first = skip // BLOCK_SIZE
    return first, tl.load(positions + s) // BLOCK_SIZE - first + 1, skip % BLOCK_SIZE


@triton.jit(
    do_not_specialize=["num_columns", "num_rows"],
    do_not_specialize_on_alignment=[*OF_ROWS, "budgets"],
)
def page_logits_kernel(
    logits,
    query,
    pool,
    block_table,
    requests,
    positions,
    skips,
    budgets,
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
    """Compute `logits[s, h, page]`, `[S, H, num_columns]`, of rows that do not read everything.

    Grid: row and KV head; every which tile of pages. Pages have `num_rows` rows in the pool, of
    which the largest product counts. `IN_FLOAT32` is for a pool whose numbers the query's dtype
    does not hold.
    """
    s = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    first, visible, _ = pages_seen(positions, skips, s, BLOCK_SIZE)
    candidates = visible - 1
    own = tl.program_id(1) * BLOCK_P
    if (own >= candidates) | (tl.load(budgets + s) >= visible):
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
    table_row = block_table + tl.load(requests + s).to(tl.int64) * stride_table + first
    heads_at = pool + g.to(tl.int64) * stride_pool_head + dims[None, :]
    place = (s.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_columns
    for begin in range(own, candidates, tl.num_programs(1) * BLOCK_P):
        columns = begin + tl.arange(0, BLOCK_P)
        # Pages behind the last are loaded from it: their blocks belong to the request.
        blocks = tl.load(table_row + tl.minimum(columns, candidates - 1)).to(tl.int64)
        entries = heads_at + (blocks * stride_pool_block)[:, None]
        best = tl.full([ROWS, BLOCK_P], float("-inf"), tl.float32)
        for i in range(num_rows):
            k = tl.load(entries + i * stride_pool_row, mask=dim_mask, other=0.0).to(q.dtype)
            products = dot(q, tl.trans(k))
            if KIND != "rows":
                k = tl.load(entries + HEAD_SIZE, mask=dim_mask, other=0.0).to(q.dtype)
                products += dot(second, tl.trans(k))
            best = tl.maximum(best, products, propagate_nan=tl.PropagateNan.ALL)
        best *= scale
        if HAS_SOFT_CAP:
            best = soft_capped(best, soft_cap)
        tl.store(
            logits + place[:, None] + columns[None, :],
            best,
            mask=(rows < GROUP)[:, None] & (columns < candidates)[None, :],
        )


@triton.jit
def score_in_place(
    row,
    num_columns,
    candidates,
    sinks,
    g,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write the scores of a KV head over the logits of its first query head, which `row` points to.

    The softmax over the candidates is taken in each query head, then the heads are combined.

    Returns:
        Whether a score is NaN; then all of them are written as 0.
    """
    rows, offsets = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    held = tl.minimum(rows, GROUP - 1)
    source = row + (held.to(tl.int64) * num_columns)[:, None]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, candidates, BLOCK):
        columns = (begin + offsets)[None, :]
        tile = tl.load(source + columns, mask=columns < candidates, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tile, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(tile - new_top[:, None]), 1)
        top = new_top
    if HAS_SINKS:
        sink = tl.load(sinks + g * GROUP + held).to(tl.float32) * LOG2_E
        before = top
        top, total, _ = with_sink(before, total, sink)
    wrong = tl.max((total != total).to(tl.int32), 0) > 0
    for begin in range(0, candidates, BLOCK):
        columns = begin + offsets
        seen = columns < candidates
        tile = tl.load(source + columns[None, :], mask=seen[None, :], other=float("-inf"))
        weights = tl.exp2(tile - top[:, None]) / total[:, None]
        weights = tl.where((rows < GROUP)[:, None] & seen[None, :], weights, 0.0)
        combined = tl.max(weights, 0) if LARGEST else tl.sum(weights, 0) / GROUP
        # Other threads may hold the same logits, and must have loaded them.
        tl.debug_barrier()
        tl.store(row + columns, tl.where(wrong, 0.0, combined), mask=seen)
    tl.debug_barrier()  # the threads' stores, before other threads load them
    return wrong


@triton.jit(
    do_not_specialize=[
        *("num_columns", "num_sinks", "num_recent", "width", "name_of_block", "name_of_head")
    ],
    do_not_specialize_on_alignment=[*OF_ROWS, *OF_LISTS, "budgets", "sinks"],
)
def choose_pages_kernel(
    names_out,
    lens_out,
    head_lens,
    hidden_out,
    unranked,
    miscounted,
    logits,
    summaries,
    key_cache,
    block_table,
    requests,
    positions,
    skips,
    budgets,
    sinks,
    num_columns,
    num_sinks,
    num_recent,
    width,
    name_of_block,
    name_of_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_summary_block,
    stride_summary_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTMAX_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FILLS: tl.constexpr,
    KIND: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Score a row's pages for one KV head, and write its list; the first head writes the numbers.

    The search is that of `select_kernel`, over the pages before the last `num_recent`. Where the
    list has everything, all pages count as recent. With `FILLS` the page that the row's token
    completes is summarised. Grid: row and KV head.
    """
    s = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    first, visible, hidden = pages_seen(positions, skips, s, BLOCK_SIZE)
    position, budget = tl.load(positions + s), tl.load(budgets + s)
    table_row = block_table + tl.load(requests + s).to(tl.int64) * stride_table + first
    always = tl.maximum(num_sinks, (hidden > 0).to(tl.int32))
    count = tl.minimum(visible, tl.maximum(budget, always + num_recent))
    is_whole = count == visible
    recent = tl.where(is_whole, visible, num_recent)
    candidates = visible - recent
    row = logits + (s.to(tl.int64) * NUM_KV_HEADS + g) * GROUP * num_columns
    wrong = score_in_place(
        row, num_columns, tl.where(is_whole, 0, visible - 1), sinks, g,
        GROUP, ROWS, SOFTMAX_BLOCK, LARGEST, HAS_SINKS,
    )  # fmt: skip
    names_at = names_out + tl.program_id(0).to(tl.int64) * width
    offsets, of_head = tl.arange(0, BLOCK), g * name_of_head

    prefix, wanted = kth_largest(row, candidates, always, count - recent, BLOCK)
    taken = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for begin in range(0, candidates, BLOCK):
        columns = begin + offsets
        chosen, place, taken, equal_before = next_chosen(
            row, columns, candidates, always, prefix, wanted, taken, equal_before
        )
        chosen &= place < width
        blocks = tl.load(table_row + columns, mask=chosen, other=0)
        tl.store(names_at + place, blocks * name_of_block + of_head, mask=chosen)

    for begin in range(count - recent, count, BLOCK):
        place = begin + offsets
        listed = (place < count) & (place < width)
        blocks = tl.load(table_row + visible - count + place, mask=listed, other=0)
        tl.store(names_at + place, blocks * name_of_block + of_head, mask=listed)
    length = (count - 1) * BLOCK_SIZE + position % BLOCK_SIZE + 1
    tl.store(head_lens + tl.program_id(0), length)
    if wrong:
        tl.store(unranked + s, True)
    if g == 0:
        tl.store(lens_out + s, length)
        tl.store(hidden_out + s, hidden)
        if count != budget:
            tl.store(miscounted + s, True)
    if FILLS:
        block = tl.load(table_row + visible - 1)
        if position % BLOCK_SIZE == BLOCK_SIZE - 1:
            summarise_page(
                summaries, key_cache, block, g, position // BLOCK_SIZE,
                tl.load(skips + s), position + 1,
                stride_key_block, stride_key_head, stride_key_token,
                stride_summary_block, stride_summary_head,
                KIND, HEAD_SIZE, BLOCK_D, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
