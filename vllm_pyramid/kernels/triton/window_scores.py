# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `window_scores`: log-sum-exp of the window's queries, mass per key, pooling.

There are two passes over K. The first finds each query's log-sum-exp (split over the context, then
joined), and is left out if attention has written it. The second computes the logits again and sums
the probabilities of every key. Nothing of size (queries x keys) is stored.

A tile of query rows holds `HEADS` heads times `WINDOW_TILE` queries, so that a short window still
fills a tensor-core tile; row `i` is head `i // WINDOW_TILE`, query `i % WINDOW_TILE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    dot,
    key_factors,
    load_keys,
    soft_capped,
    with_sink,
    with_tile,
)


@triton.jit
def window_logits(
    q, k, scale, soft_cap, key_positions, query_positions, HAS_SOFT_CAP: tl.constexpr
):
    """Compute the base-2 logits of a tile with the causal mask inside the window.

    `scale` is a number, or `[1, BLOCK_K]` with one for each key.
    """
    logits = dot(q, tl.trans(k))
    logits = logits * scale
    if HAS_SOFT_CAP:
        logits = soft_capped(logits, soft_cap)
    return tl.where(key_positions[None, :] <= query_positions[:, None], logits, float("-inf"))


@triton.jit
def load_window_rows(
    query, end, rows, head_start, window_start, g, stride_token, stride_head, dims, dim_mask,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, WINDOW_TILE: tl.constexpr,
):  # fmt: skip
    """Load a tile of query rows; rows of padding repeat a real one: finite and masked."""
    head_in_group = head_start + rows // WINDOW_TILE
    in_window = window_start + rows % WINDOW_TILE
    row_mask = (head_in_group < GROUP) & (in_window < WINDOW)
    heads = (g * GROUP + tl.minimum(head_in_group, GROUP - 1)).to(tl.int64)
    window_row = tl.minimum(in_window, WINDOW - 1)
    tokens = (end - WINDOW + window_row).to(tl.int64)
    q = tl.load(
        query + tokens[:, None] * stride_token + heads[:, None] * stride_head + dims[None, :],
        mask=dim_mask[None, :],
        other=0.0,
    )
    return q, tokens, heads, window_row, row_mask


# Rows of a larger tensor begin at any multiple of four bytes.
@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["query_ends", "prompt_lens", "starts"],
)
def window_max_sum_kernel(
    partial_max,
    partial_sum,
    query,
    key_cache,
    key_scales,
    block_table,
    query_ends,
    prompt_lens,
    starts,
    scale,
    soft_cap,
    num_splits,
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
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Find the maximum and sum of each row over one split of the keys, from `starts[r]` on.

    `partial_*` are `[R, H, W, splits]`. Grid: request and KV head, row tile, split.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    window_tiles: tl.constexpr = (WINDOW + WINDOW_TILE - 1) // WINDOW_TILE
    head_start = (tl.program_id(1) // window_tiles) * HEADS
    window_start = (tl.program_id(1) % window_tiles) * WINDOW_TILE
    split = tl.program_id(2)
    length = tl.load(prompt_lens + r)
    start = tl.load(starts + r) if HAS_STARTS else 0

    rows = tl.arange(0, HEADS * WINDOW_TILE)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_SIZE
    q, _, heads, window_row, row_mask = load_window_rows(
        query, tl.load(query_ends + r), rows, head_start, window_start, g, stride_query_token,
        stride_query_head, dims, dim_mask, GROUP, WINDOW, WINDOW_TILE,
    )  # fmt: skip
    query_positions = length - WINDOW + window_row
    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
    scale_base = key_scales + g.to(tl.int64) * stride_scale_head

    running_max = tl.full([HEADS * WINDOW_TILE], float("-inf"), tl.float32)
    running_sum = tl.zeros([HEADS * WINDOW_TILE], tl.float32)
    begin = split * TILES_PER_SPLIT
    end = tl.minimum(begin + TILES_PER_SPLIT, tl.cdiv(length, BLOCK_K))
    for tile in range(begin, end):
        positions = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = tl.minimum(tl.maximum(positions, start), length - 1)
        k = load_keys(
            key_base, table_row, inside, stride_key_block, stride_key_token, dim_mask, BLOCK_SIZE
        )
        factors = key_factors(
            scale, scale_base, table_row, inside, stride_scale_block, stride_scale_token,
            BLOCK_SIZE, HAS_KEY_SCALES,
        )  # fmt: skip
        logits = window_logits(q, k, factors, soft_cap, positions, query_positions, HAS_SOFT_CAP)
        if HAS_STARTS:
            logits = tl.where(positions[None, :] >= start, logits, float("-inf"))
        running_max, running_sum = with_tile(running_max, running_sum, logits)

    num_heads = NUM_KV_HEADS * GROUP
    place = ((r * num_heads + heads) * WINDOW + window_row) * num_splits + split
    tl.store(partial_max + place, running_max, mask=row_mask)
    tl.store(partial_sum + place, running_sum, mask=row_mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def join_log_sum_exp_kernel(
    log_sum_exp,
    partial_max,
    partial_sum,
    num_rows,
    num_splits,
    ROWS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
):
    """Join the splits of `ROWS` (request, head, query) rows; store natural logarithms, no sinks."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_rows
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_splits, SPLITS_TILE):
        splits = start + tl.arange(0, SPLITS_TILE)
        mask = row_mask[:, None] & (splits < num_splits)[None, :]
        place = rows[:, None] * num_splits + splits[None, :]
        maxima = tl.load(partial_max + place, mask=mask, other=float("-inf"))
        sums = tl.load(partial_sum + place, mask=mask, other=0.0)
        new_max = tl.maximum(running_max, tl.max(maxima, 1))
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp2(running_max - reference_max) + tl.sum(
            sums * tl.exp2(maxima - reference_max[:, None]), 1
        )
        running_max = new_max
    running_sum = tl.where(row_mask, running_sum, 1.0)
    tl.store(log_sum_exp + rows, (running_max + tl.log2(running_sum)) / LOG2_E, mask=row_mask)


@triton.jit(
    do_not_specialize=["num_columns"],
    do_not_specialize_on_alignment=["query_ends", "prompt_lens", "sinks"],
)
def window_mass_kernel(
    mass,
    log_sum_exp,
    sinks,
    query,
    key_cache,
    key_scales,
    block_table,
    query_ends,
    prompt_lens,
    scale,
    soft_cap,
    num_columns,
    stride_lse_row,
    stride_lse_head,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    stride_table,
    LSE_BY_TOKEN: tl.constexpr,
    REDUCE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Sum the probabilities that the window gives each key, reduced over the group's query heads.

    `mass` is `[R, G, num_columns]`; columns behind `prompt_lens[r] - WINDOW` become -inf.
    `log_sum_exp` is `[T, H]` (`LSE_BY_TOKEN`) or `[R, H, W]`, by strides; the sinks are added to it
    here. Grid: request and KV head, tile of keys. A tile of K is loaded once and multiplied with
    all queries of the group.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    positions = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    length = tl.load(prompt_lens + r)
    candidates = length - WINDOW
    result = tl.full([BLOCK_K], float("-inf"), tl.float32)

    if tl.program_id(1) * BLOCK_K < candidates:
        dims = tl.arange(0, BLOCK_D)
        dim_mask = dims < HEAD_SIZE
        inside = tl.minimum(positions, length - 1)
        table_row = block_table + r.to(tl.int64) * stride_table
        key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
        scale_base = key_scales + g.to(tl.int64) * stride_scale_head
        k = load_keys(
            key_base, table_row, inside, stride_key_block, stride_key_token, dim_mask, BLOCK_SIZE
        )
        factors = key_factors(
            scale, scale_base, table_row, inside, stride_scale_block, stride_scale_token,
            BLOCK_SIZE, HAS_KEY_SCALES,
        )  # fmt: skip
        end = tl.load(query_ends + r)
        rows = tl.arange(0, HEADS * WINDOW_TILE)
        reduced = tl.zeros([BLOCK_K], tl.float32)
        for head_start in range(0, GROUP, HEADS):
            per_head = tl.zeros([HEADS, BLOCK_K], tl.float32)
            for window_start in range(0, WINDOW, WINDOW_TILE):
                q, tokens, heads, window_row, row_mask = load_window_rows(
                    query, end, rows, head_start, window_start, g, stride_query_token,
                    stride_query_head, dims, dim_mask, GROUP, WINDOW, WINDOW_TILE,
                )  # fmt: skip
                if LSE_BY_TOKEN:
                    lse_rows = tokens
                else:
                    lse_rows = r.to(tl.int64) * NUM_KV_HEADS * GROUP * WINDOW + window_row
                lse = tl.load(log_sum_exp + lse_rows * stride_lse_row + heads * stride_lse_head)
                lse *= LOG2_E
                if HAS_SINKS:
                    sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
                    highest, total, _ = with_sink(lse, 1.0, sink)
                    lse = highest + tl.log2(total)
                # Candidates lie before the window, where the causal mask hides nothing.
                logits = window_logits(
                    q, k, factors, soft_cap, inside, tl.zeros_like(rows) + length, HAS_SOFT_CAP
                )
                probabilities = tl.exp2(logits - lse[:, None])
                probabilities = tl.where(row_mask[:, None], probabilities, 0.0)
                per_head += tl.sum(tl.reshape(probabilities, [HEADS, WINDOW_TILE, BLOCK_K]), axis=1)
            if REDUCE == "max":  # probabilities are not negative, so padded heads do no harm
                of_all = tl.sum(per_head, 0)  # NaN if one is, of which a maximum takes the other
                highest = tl.where(of_all == of_all, tl.max(per_head, 0), of_all)
                reduced = tl.maximum(reduced, highest, propagate_nan=tl.PropagateNan.ALL)
            else:
                reduced += tl.sum(per_head, 0)
        if REDUCE == "mean":
            reduced = reduced / GROUP
        result = tl.where(positions < candidates, reduced, result)

    row = tl.program_id(0).to(tl.int64) * num_columns
    tl.store(mass + row + positions, result, mask=positions < num_columns)


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["prompt_lens"])
def pool_kernel(
    pooled,
    mass,
    prompt_lens,
    num_columns,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    AVERAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pool along the positions, stride 1, same length; zero padding counts in the average.

    Grid: request and KV head, tile of positions.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    candidates = tl.load(prompt_lens + r) - WINDOW
    row = tl.program_id(0).to(tl.int64) * num_columns
    if AVERAGE:
        total = tl.zeros([BLOCK], tl.float32)
    else:
        total = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(KERNEL_SIZE):
        neighbours = columns + (i - KERNEL_SIZE // 2)
        mask = (neighbours >= 0) & (neighbours < candidates)
        if AVERAGE:
            total += tl.load(mass + row + neighbours, mask=mask, other=0.0)
        else:
            own = tl.load(mass + row + neighbours, mask=mask, other=float("-inf"))
            total = tl.maximum(total, own, propagate_nan=tl.PropagateNan.ALL)
    if AVERAGE:
        total = total / KERNEL_SIZE
    total = tl.where(columns < candidates, total, float("-inf"))
    tl.store(pooled + row + columns, total, mask=columns < num_columns)
