# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `select`: exact top-k of ragged rows, one program for each request and KV head.

A radix search over the order-preserving integers of the floats (four histograms of eight bits each)
finds the k-th largest score. One ordered sweep then writes the positions with a larger score, and
of those with an equal one the lowest that still fit. There is no sort and no scratch memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_bits(scores, positions, num_sinks):
    """Map scores to unsigned integers in the same order; -0.0 equals 0.0, sinks count as +inf."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    scores = tl.where(positions < num_sinks, float("inf"), scores)
    bits = scores.to(tl.int32, bitcast=True)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return signed.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def add_digit(counts, bins, prefix, wanted):
    """Extend the first bits of the last score that is wanted by eight bits, and count what is left.

    `counts`, `[256]`, says how many scores that begin with `prefix` go on with each of `bins`;
    `wanted` scores are still to be found among them.
    """
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32), 0) - 1, 0)
    wanted -= tl.sum(tl.where(bins > digit, counts, 0), 0)
    return prefix * 256 + digit.to(tl.uint32), wanted


@triton.jit
def kth_largest(row, count, num_sinks, wanted, BLOCK: tl.constexpr):
    """Find the `wanted`-th largest of `count` scores: its bits, and how many equal ones belong.

    The first `num_sinks` scores count as +inf.
    """
    offsets, bins = tl.arange(0, BLOCK), tl.arange(0, 256)
    # `wanted` counts the scores still to be found among those that share the prefix.
    prefix = tl.full([], 0, tl.uint32)
    for i in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, count, BLOCK):
            columns = start + offsets
            inside = columns < count
            bits = ordered_bits(tl.load(row + columns, mask=inside, other=0.0), columns, num_sinks)
            if i > 0:
                inside &= (bits >> (32 - 8 * i)) == prefix
            digits = ((bits >> (24 - 8 * i)) & 0xFF).to(tl.int32)
            counts += tl.histogram(digits, 256, mask=inside)
        prefix, wanted = add_digit(counts, bins, prefix, wanted)
    return prefix, wanted


@triton.jit
def next_chosen(row, columns, count, num_sinks, prefix, wanted, taken, equal_before):
    """Tell which of the scores at `columns` are among the largest, and where they go.

    `taken` and `equal_before` count the chosen scores, and those equal to the last one chosen,
    before these columns. Returns masks of the chosen columns, their places, and both for the next
    columns.
    """
    inside = columns < count
    bits = ordered_bits(tl.load(row + columns, mask=inside, other=0.0), columns, num_sinks)
    equal = (inside & (bits == prefix)).to(tl.int32)
    equal_rank = equal_before + tl.cumsum(equal, 0) - equal
    chosen = inside & ((bits > prefix) | ((equal == 1) & (equal_rank < wanted)))
    ones = chosen.to(tl.int32)
    place = taken + tl.cumsum(ones, 0) - ones
    return chosen, place, taken + tl.sum(ones, 0), equal_before + tl.sum(equal, 0)


# Rows of a larger tensor begin at any multiple of four bytes, and lengths change with every step.
@triton.jit(
    do_not_specialize=["num_sinks", "max_keep", "stride_scores_request", "stride_scores_head"],
    do_not_specialize_on_alignment=["prompt_lens", "keeps"],
)
def select_kernel(
    kept,
    scores,
    prompt_lens,
    keeps,
    num_sinks,
    max_keep,
    stride_scores_request,
    stride_scores_head,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `kept[r, g, :]`, `[R, G, max_keep]` contiguous: ascending positions, then -1."""
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    length = tl.load(prompt_lens + r)
    keep = tl.load(keeps + r)
    candidates = length - WINDOW
    row = scores + r.to(tl.int64) * stride_scores_request + g.to(tl.int64) * stride_scores_head
    target = kept + tl.program_id(0).to(tl.int64) * max_keep
    offsets = tl.arange(0, BLOCK)

    prefix, wanted = kth_largest(row, candidates, num_sinks, keep - WINDOW, BLOCK)
    taken = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, candidates, BLOCK):
        positions = start + offsets
        chosen, place, taken, equal_before = next_chosen(
            row, positions, candidates, num_sinks, prefix, wanted, taken, equal_before
        )
        tl.store(target + place, positions, mask=chosen)

    for start in range(keep - WINDOW, max_keep, BLOCK):
        place = start + offsets
        positions = tl.where(place < keep, length - keep + place, -1)
        tl.store(target + place, positions, mask=place < max_keep)


# A slice of a larger tensor begins at any multiple of four bytes.
@triton.jit(
    do_not_specialize=["num_columns", "stride_scores_request", "stride_scores_head"],
    do_not_specialize_on_alignment=["firsts", "ends"],
)
def unrankable_kernel(
    wrong,
    scores,
    firsts,
    ends,
    num_columns,
    stride_scores_request,
    stride_scores_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `wrong[r, g]`: whether NaN or +inf is among the scores that count."""
    r = tl.program_id(0) // NUM_KV_HEADS
    g = tl.program_id(0) % NUM_KV_HEADS
    first = tl.maximum(tl.load(firsts + r), 0)
    end = tl.minimum(tl.load(ends + r), num_columns)
    row = scores + r.to(tl.int64) * stride_scores_request + g.to(tl.int64) * stride_scores_head
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(first, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = tl.load(row + columns, mask=columns < end, other=0.0)
        found |= tl.where(score < float("inf"), 0, 1)  # NaN is not below anything
    tl.store(wrong + tl.program_id(0), tl.max(found, 0) > 0)
