# SPDX-License-Identifier: Apache-2.0
"""Device functions that several kernels share: loads, products, and pieces of a softmax.

Logits are kept in base 2 (`exp2` is one instruction), so the softmax scale and the soft cap arrive
multiplied by log2(e).

In `load_rows`, row `i` of a request and KV head is query `i // GROUP` of query head `i % GROUP`. In
`visible_logits` positions count from `skips[r]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """Multiply matrices with float32 sums; products are exact for 16-bit inputs, IEEE for float32.

    `b` may have a narrower dtype than `a`, all of whose numbers `a`'s dtype holds.
    """
    if INTERPRETED:
        # Triton's interpreter keeps bfloat16 as integers and would multiply their bit patterns.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def soft_capped(logits, soft_cap):
    """Return `soft_cap * tanh(logits / soft_cap)`, by `exp`, which every Triton back end has."""
    ratio = tl.exp(-2.0 * tl.abs(logits) / soft_cap)
    magnitude = soft_cap * (1.0 - ratio) / (1.0 + ratio)
    return tl.where(logits < 0, -magnitude, magnitude)


@triton.jit
def with_sink(maximum, total, sink):
    """Add a sink, a key without a value, to a softmax so far (total * 2**maximum).

    The results are the maximum and the total with it, and the factor for earlier sums.
    """
    new_max = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_max)
    return new_max, total * shrink + tl.exp2(sink - new_max), shrink


@triton.jit
def with_tile(maximum, total, logits):
    """Add a tile of logits to the softmax of each row so far (total * 2**maximum)."""
    new_max = tl.maximum(maximum, tl.max(logits, 1))
    # A row may see no key of this tile, nor of the tiles before it.
    reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    total = total * tl.exp2(maximum - reference_max) + tl.sum(
        tl.exp2(logits - reference_max[:, None]), 1
    )
    return new_max, total


@triton.jit
def natural_log_sum(maximum, total):
    """Return ln(total * 2**maximum); -inf where nothing was summed."""
    log = maximum / LOG2_E + tl.log(tl.where(total == 0.0, 1.0, total))
    return tl.where(total == 0.0, float("-inf"), log)


@triton.jit
def load_rows(query, start, rows, num_rows, g, stride_token, stride_head, dims, HEAD_SIZE, GROUP):
    """Load query rows; rows behind the last repeat it: finite numbers that the caller masks."""
    rows = tl.minimum(rows, num_rows - 1)
    tokens = (start + rows // GROUP).to(tl.int64)
    heads = (g * GROUP + rows % GROUP).to(tl.int64)
    q = tl.load(
        query + tokens[:, None] * stride_token + heads[:, None] * stride_head + dims[None, :],
        mask=(dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    return q, tokens, heads


@triton.jit
def load_keys(key_base, table_row, positions, stride_block, stride_token, dim_mask, BLOCK_SIZE):
    """Load K at absolute positions, all of which must belong to the request."""
    blocks = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
    in_block = (positions % BLOCK_SIZE).to(tl.int64)
    return tl.load(
        key_base + (blocks * stride_block + in_block * stride_token)[:, None],
        mask=dim_mask[None, :],
        other=0.0,
    )


@triton.jit
def key_factors(
    scale,
    scale_base,
    table_row,
    positions,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
):
    """Return the factors of the products with the keys at these positions.

    This is `scale`, or `[1, BLOCK_K]` if every token has a scale of its own.
    """
    if HAS_KEY_SCALES:
        blocks = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
        in_block = (positions % BLOCK_SIZE).to(tl.int64)
        own = tl.load(scale_base + blocks * stride_block + in_block * stride_token)
        return (scale * own)[None, :]
    else:
        return scale


@triton.jit
def visible_logits(
    q,
    k,
    local,
    query_local,
    visible_keys,
    scale,
    soft_cap,
    sliding_window,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Compute the base-2 logits of a tile; -inf where a row does not see the key.

    `scale` is a number, or `[1, BLOCK_K]` with one for each key.
    """
    logits = dot(q, tl.trans(k))
    logits = logits * scale
    if HAS_SOFT_CAP:
        logits = soft_capped(logits, soft_cap)
    visible = (local[None, :] <= query_local[:, None]) & (local < visible_keys)[None, :]
    if HAS_WINDOW:
        visible &= local[None, :] > query_local[:, None] - sliding_window
    return tl.where(visible, logits, float("-inf"))
