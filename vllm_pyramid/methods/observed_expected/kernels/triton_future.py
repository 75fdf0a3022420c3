# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the queries to come: turn them, and find what they are expected to look at.

The variance over the window's queries takes the place of the product with their covariance. The
turned queries are no 16-bit numbers: where the cache has 8 or 16 bits, each is the sum of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    dot,
    key_factors,
    load_keys,
    with_tile,
)


# Rows of a larger tensor begin at any multiple of four bytes, and lengths and counts differ from
# step to step: one variant of a kernel serves all.
@triton.jit(
    do_not_specialize=["positions", "table_length"],
    do_not_specialize_on_alignment=["query_ends", "last_positions"],
)
def future_queries_kernel(
    future,
    query,
    query_ends,
    last_positions,
    cos_sin,
    positions,
    table_length,
    stride_query_token,
    stride_query_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    HALVES: tl.constexpr,
    POSITIONS_TILE: tl.constexpr,
):
    """Turn the queries of one request and head by the angle between their positions and the mean.

    `future` is `[R, H, W, D]`. The first `ROTATED` channels turn, in pairs; 0: no embedding.
    Grid: request and head.
    """
    r = tl.program_id(0) // NUM_HEADS
    h = tl.program_id(0) % NUM_HEADS
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_SIZE
    last = tl.load(last_positions + r)
    end = tl.load(query_ends + r)
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        turns = dims < ROTATED
        if HALVES:
            is_first = dims < half
            pair = dims % half
            partner = tl.where(is_first, dims + half, dims - half)
        else:
            is_first = dims % 2 == 0
            pair = dims // 2
            partner = tl.where(is_first, dims + 1, dims - 1)
        partner = tl.where(turns, partner, dims)
        sign = tl.where(is_first, -1.0, 1.0)
        mean_cos = tl.zeros([BLOCK_D], tl.float32)
        mean_sin = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, positions, POSITIONS_TILE):
            places = first + tl.arange(0, POSITIONS_TILE)
            known = tl.minimum(last + 1 + places, table_length - 1).to(tl.int64)
            at = cos_sin + known[:, None] * stride_table + pair[None, :]
            mask = (places < positions)[:, None] & turns[None, :]
            mean_cos += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32), 0)
            mean_sin += tl.sum(tl.load(at + half, mask=mask, other=0.0).to(tl.float32), 0)
        mean_cos = mean_cos / positions
        mean_sin = mean_sin / positions
    for window_start in range(0, WINDOW, WINDOW_TILE):
        in_window = window_start + tl.arange(0, WINDOW_TILE)
        window_row = tl.minimum(in_window, WINDOW - 1)
        tokens = (end - WINDOW + window_row).to(tl.int64)
        row = query + tokens[:, None] * stride_query_token + h.to(tl.int64) * stride_query_head
        x = tl.load(row + dims[None, :], mask=dim_mask[None, :], other=0.0).to(tl.float32)
        if ROTATED > 0:
            known = tl.minimum(last - WINDOW + 1 + window_row, table_length - 1).to(tl.int64)
            at = cos_sin + known[:, None] * stride_table + pair[None, :]
            cos = tl.load(at, mask=turns[None, :], other=1.0).to(tl.float32)
            sin = tl.load(at + half, mask=turns[None, :], other=0.0).to(tl.float32)
            squares = cos * cos + sin * sin  # 1, or more where the embedding scales (YaRN)
            other = tl.load(row + partner[None, :], mask=dim_mask[None, :], other=0.0)
            turned = x * (cos * mean_cos[None, :] + sin * mean_sin[None, :])
            across = cos * mean_sin[None, :] - sin * mean_cos[None, :]
            turned += sign[None, :] * other.to(tl.float32) * across
            x = tl.where(turns[None, :], turned / squares, x)
        target = (tl.program_id(0).to(tl.int64) * WINDOW + window_row) * HEAD_SIZE
        mask = (in_window < WINDOW)[:, None] & dim_mask[None, :]
        tl.store(future + target[:, None] + dims[None, :], x, mask=mask)


@triton.jit
def load_future(
    future, row, head_in_group, in_window, dims, HEAD_SIZE: tl.constexpr, WINDOW: tl.constexpr
):
    """Load float32 queries of one KV head; `row` is its first query head, of all requests'."""
    places = (row + head_in_group) * WINDOW + tl.minimum(in_window, WINDOW - 1)
    return tl.load(
        future + places[:, None] * HEAD_SIZE + dims[None, :],
        mask=(dims < HEAD_SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def exact_products(x, k, dtype: tl.constexpr):
    """Multiply float32 `x` with `k`; where `dtype` has 16 bits, as the sum of two numbers of it."""
    if dtype == tl.float32:
        return dot(x, tl.trans(k))
    else:
        high = x.to(dtype)
        low = (x - high.to(tl.float32)).to(dtype)
        return dot(high, tl.trans(k)) + dot(low, tl.trans(k))


@triton.jit(
    do_not_specialize=["first_row", "num_columns", "num_splits", "first_tokens"],
    do_not_specialize_on_alignment=["prompt_lens", "starts"],
)
def future_logits_kernel(
    logits,
    partial_max,
    partial_sum,
    future,
    query,
    key_cache,
    key_scales,
    block_table,
    prompt_lens,
    starts,
    scale,
    first_row,
    num_columns,
    num_splits,
    first_tokens,
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
    HAS_KEY_SCALES: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Find the expected logits of one split of the keys, and the maximum and sum of each head.

    `logits` is `[R, H, num_columns]`, in base 2, written behind `first_tokens`. `partial_*` are
    `[rows, splits]`; row `first_row` is of the first request's first head. `query` has the dtype of
    the products. Grid: request and KV head, tile of heads, split.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    head_start = tl.program_id(1) * HEADS
    split = tl.program_id(2)
    length = tl.load(prompt_lens + r)
    start = 0
    if HAS_STARTS:
        start = tl.load(starts + r)
    counted = start + first_tokens

    rows = tl.arange(0, HEADS * WINDOW_TILE)
    # Heads of padding repeat a real one: finite numbers that are not stored.
    head_in_group = tl.minimum(head_start + rows // WINDOW_TILE, GROUP - 1)
    dims = tl.arange(0, BLOCK_D)
    row = (r.to(tl.int64) * NUM_KV_HEADS + g) * GROUP
    single: tl.constexpr = WINDOW <= WINDOW_TILE
    if single:
        x = load_future(future, row, head_in_group, rows % WINDOW_TILE, dims, HEAD_SIZE, WINDOW)
    table_row = block_table + r.to(tl.int64) * stride_table
    key_base = key_cache + g.to(tl.int64) * stride_key_head + dims[None, :]
    scale_base = key_scales + g.to(tl.int64) * stride_scale_head
    heads = head_start + tl.arange(0, HEADS)
    lines = logits + (row + tl.minimum(heads, GROUP - 1)) * num_columns

    running_max = tl.full([HEADS], float("-inf"), tl.float32)
    running_sum = tl.zeros([HEADS], tl.float32)
    begin = split * TILES_PER_SPLIT
    end = tl.minimum(begin + TILES_PER_SPLIT, tl.cdiv(length, BLOCK_K))
    for tile in range(begin, end):
        positions = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = tl.minimum(tl.maximum(positions, start), length - 1)
        k = load_keys(
            key_base, table_row, inside, stride_key_block, stride_key_token, dims < HEAD_SIZE,
            BLOCK_SIZE,
        )  # fmt: skip
        factors = key_factors(
            scale, scale_base, table_row, inside, stride_scale_block, stride_scale_token,
            BLOCK_SIZE, HAS_KEY_SCALES,
        )  # fmt: skip
        mean = tl.zeros([HEADS, BLOCK_K], tl.float32)
        squares = tl.zeros([HEADS, BLOCK_K], tl.float32)
        for window_start in range(0, WINDOW, WINDOW_TILE):
            in_window = window_start + rows % WINDOW_TILE
            if not single:
                x = load_future(future, row, head_in_group, in_window, dims, HEAD_SIZE, WINDOW)
            products = exact_products(x, k, query.dtype.element_ty) * factors
            real = tl.reshape(in_window < WINDOW, [HEADS, WINDOW_TILE])[:, :, None]
            products = tl.reshape(products, [HEADS, WINDOW_TILE, BLOCK_K])
            here = tl.minimum(WINDOW - window_start, WINDOW_TILE)
            own_mean = tl.sum(tl.where(real, products, 0.0), 1) / here
            deviations = tl.where(real, products - own_mean[:, None, :], 0.0)
            # The queries before and these, as if they had come together (Chan et al.).
            share = here / (window_start + here).to(tl.float32)
            apart = own_mean - mean
            mean += apart * share
            squares += tl.sum(deviations * deviations, 1) + apart * apart * share * window_start
        found = (mean + squares / (2 * WINDOW)) * LOG2_E
        counts = ((positions >= counted) & (positions < length))[None, :]
        stored = counts & (heads < GROUP)[:, None]
        tl.store(lines[:, None] + positions[None, :], found, mask=stored)
        found = tl.where(counts, found, float("-inf"))
        running_max, running_sum = with_tile(running_max, running_sum, found)

    place = (first_row + row + heads) * num_splits + split
    tl.store(partial_max + place, running_max, mask=heads < GROUP)
    tl.store(partial_sum + place, running_sum, mask=heads < GROUP)
