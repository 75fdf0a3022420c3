# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `observed_expected`, between those of `window_scores` and `triton_future.py`.

    future_queries_kernel    the last queries at the positions to come, on average   (triton_future)
    window_max_sum_kernel    softmax of the last queries, in splits of the keys      (window_scores)
    future_logits_kernel     logits of the queries to come, and their softmax, alike (triton_future)
    join_log_sum_exp_kernel  both softmaxes                                          (window_scores)
    window_mass_kernel       what the last queries give each key                     (window_scores)
    weigh_kernel             both masses times the norms of V                        [R, G, columns]
    pool_and_sum_kernel      the first pooled; sums of both, tile by tile
    blend_kernel             the shares of both, added

K is read three times and V once. Sums go over tiles that begin at a request's first column, so that
a batch changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.device_functions import LOG2_E, key_factors, load_keys, with_sink
from vllm_pyramid.methods.observed_expected.kernels.reference import LEAST_SUM

LEAST = tl.constexpr(LEAST_SUM)


# Rows of a larger tensor begin at any multiple of four bytes, and lengths and counts differ from
# step to step: one variant of a kernel serves all.
@triton.jit(
    do_not_specialize=["first_row", "num_columns", "first_tokens", "last_tokens"],
    do_not_specialize_on_alignment=["prompt_lens", "starts", "sinks"],
)
def weigh_kernel(
    mass,
    expected,
    logits,
    log_sum_exp,
    sinks,
    value_cache,
    value_scales,
    block_table,
    prompt_lens,
    starts,
    first_row,
    num_columns,
    first_tokens,
    last_tokens,
    stride_value_block,
    stride_value_head,
    stride_value_token,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr,
):
    """Multiply `mass` by the L1 norms of V, in place, and the expected weights by the L2 norms.

    Both are `[R, G, num_columns]`, and 0 outside of a request and in its last `last_tokens`; the
    second one in its first `first_tokens`, too. `log_sum_exp` has the heads' from `first_row` on,
    without the sinks. Grid: request and KV head, tile of keys.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    length = tl.load(prompt_lens + r)
    start = 0
    if HAS_STARTS:
        start = tl.load(starts + r)
    end = length - last_tokens
    positions = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    observed = tl.zeros([BLOCK_K], tl.float32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    line = tl.program_id(0).to(tl.int64) * num_columns
    if tl.program_id(1) * BLOCK_K < end:
        dims = tl.arange(0, BLOCK_D)
        inside = tl.minimum(tl.maximum(positions, start), length - 1)
        table_row = block_table + r.to(tl.int64) * stride_table
        v = load_keys(
            value_cache + g.to(tl.int64) * stride_value_head + dims[None, :],
            table_row,
            inside,
            stride_value_block,
            stride_value_token,
            dims < HEAD_SIZE,
            BLOCK_SIZE,
        ).to(tl.float32)
        absolute = tl.sum(tl.abs(v), 1)
        euclidean = tl.sqrt(tl.sum(v * v, 1))
        if HAS_VALUE_SCALES:
            own = key_factors(
                1.0,
                value_scales + g.to(tl.int64) * stride_scale_head,
                table_row,
                inside,
                stride_scale_block,
                stride_scale_token,
                BLOCK_SIZE,
                HAS_VALUE_SCALES,
            )
            own = tl.reshape(own, [BLOCK_K])
            absolute *= own
            euclidean *= own
        counts = (positions >= start) & (positions < end)
        given = tl.load(mass + line + positions, mask=counts, other=0.0)
        observed = tl.where(counts, given * absolute, 0.0)
        if HAS_EXPECTED:
            counts = (positions >= start + first_tokens) & (positions < end)
            first_head = tl.program_id(0).to(tl.int64) * GROUP
            for head in range(GROUP):
                lse = tl.load(log_sum_exp + first_row + first_head + head) * LOG2_E
                if HAS_SINKS:
                    sink = tl.load(sinks + g * GROUP + head).to(tl.float32) * LOG2_E
                    highest, total, _ = with_sink(lse, 1.0, sink)
                    lse = highest + tl.log2(total)
                found = tl.load(
                    logits + (first_head + head) * num_columns + positions,
                    mask=counts,
                    other=float("-inf"),
                )
                weights += tl.where(counts, tl.exp2(found - lse), 0.0)
            weights = tl.where(counts, weights * euclidean / GROUP, 0.0)
    inside_row = positions < num_columns
    tl.store(mass + line + positions, observed, mask=inside_row)
    if HAS_EXPECTED:
        tl.store(expected + line + positions, weights, mask=inside_row)


@triton.jit(
    do_not_specialize=["num_columns", "num_tiles", "first_tokens", "last_tokens", "kernel_size"],
    do_not_specialize_on_alignment=["prompt_lens", "starts"],
)
def pool_and_sum_kernel(
    pooled,
    sums,
    weighed,
    expected,
    prompt_lens,
    starts,
    num_columns,
    num_tiles,
    first_tokens,
    last_tokens,
    kernel_size,
    NUM_KV_HEADS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Average `weighed` over its neighbours, and sum both scores over the tokens inside.

    `weighed` is 0 where no token is, so that this is zero padding. `sums` is `[2, R, G, tiles]`.
    Grid: request and KV head, tile of columns.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = 0
    if HAS_STARTS:
        start = tl.load(starts + r)
    end = tl.load(prompt_lens + r) - last_tokens
    inside = (columns >= start + first_tokens) & (columns < end)
    line = tl.program_id(0).to(tl.int64) * num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(kernel_size):
        neighbours = columns + (i - kernel_size // 2)
        mask = inside & (neighbours >= 0) & (neighbours < end)
        total += tl.load(weighed + line + neighbours, mask=mask, other=0.0)
    total = total / kernel_size
    tl.store(pooled + line + columns, total, mask=columns < num_columns)
    place = tl.program_id(0).to(tl.int64) * num_tiles + tl.program_id(1)
    tl.store(sums + place, tl.sum(total, 0))
    if HAS_EXPECTED:
        given = tl.load(expected + line + columns, mask=inside, other=0.0)
        second = tl.num_programs(0).to(tl.int64) * num_tiles
        tl.store(sums + second + place, tl.sum(given, 0))


@triton.jit
def sum_of_tiles(sums, num_tiles, TILES: tl.constexpr):
    """Add up the tiles of one head, at least `LEAST`."""
    total = tl.zeros([TILES], tl.float32)
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        total += tl.load(sums + tiles, mask=tiles < num_tiles, other=0.0)
    found = tl.sum(total, 0)
    return tl.where(found < LEAST, LEAST, found)  # NaN stays NaN


@triton.jit(
    do_not_specialize=["num_columns", "num_tiles", "first_tokens", "last_tokens"],
    do_not_specialize_on_alignment=["prompt_lens", "starts"],
)
def blend_kernel(
    scores,
    sums,
    expected,
    prompt_lens,
    starts,
    weight,
    num_columns,
    num_tiles,
    first_tokens,
    last_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Divide both scores by their sums, in place, and add them. Grid as of `pool_and_sum_kernel`.

    Tokens of a request that are not inside get 0, columns without a token -inf.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = 0
    if HAS_STARTS:
        start = tl.load(starts + r)
    length = tl.load(prompt_lens + r)
    inside = (columns >= start + first_tokens) & (columns < length - last_tokens)
    line = tl.program_id(0).to(tl.int64) * num_columns
    of_head = sums + tl.program_id(0).to(tl.int64) * num_tiles
    result = tl.load(scores + line + columns, mask=inside, other=0.0)
    result = result / sum_of_tiles(of_head, num_tiles, TILES)
    if HAS_EXPECTED:
        second = of_head + tl.num_programs(0).to(tl.int64) * num_tiles
        given = tl.load(expected + line + columns, mask=inside, other=0.0)
        result += weight * (given / sum_of_tiles(second, num_tiles, TILES))
    result = tl.where(inside, result, 0.0)
    result = tl.where((columns >= start) & (columns < length), result, float("-inf"))
    tl.store(scores + line + columns, result, mask=columns < num_columns)
