# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that write and move rows of the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["stride_kept_request", "stride_kept_head"],
    do_not_specialize_on_alignment=["prompt_lens", "keeps"],
)
def compact_kernel(
    key_cache,
    value_cache,
    block_table,
    kept,
    prompt_lens,
    keeps,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_value_block,
    stride_value_head,
    stride_value_token,
    stride_table,
    stride_kept_request,
    stride_kept_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Move the survivors of one request and KV head to the tail, `BLOCK_D` elements of each row.

    Grid: request and KV head, piece of the row, K or V. No two programs touch the same element.
    Survivor i moves to `base + i`, `base = length - keep`, never below its own position. Tiles run
    from the last to the first: the targets of a tile from rank a are `base + a` and above, and the
    sources of all lower ranks are below. Inside a tile the barrier lets every load finish before
    the first store.
    """
    r = tl.program_id(0) // NUM_KV_HEADS
    g = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    length = tl.load(prompt_lens + r)
    keep = tl.load(keeps + r)
    base = length - keep
    if tl.program_id(2) == 0:
        cache = key_cache + g * stride_key_head
        stride_block = stride_key_block.to(tl.int64)
        stride_token = stride_key_token.to(tl.int64)
    else:
        cache = value_cache + g * stride_value_head
        stride_block = stride_value_block.to(tl.int64)
        stride_token = stride_value_token.to(tl.int64)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dim_mask = (dims < HEAD_SIZE)[None, :]
    table_row = block_table + r.to(tl.int64) * stride_table
    kept_row = kept + r.to(tl.int64) * stride_kept_request + g * stride_kept_head

    num_tiles = tl.cdiv(keep, BLOCK_ROWS)
    for i in range(num_tiles):
        ranks = (num_tiles - 1 - i) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        targets = base + ranks
        sources = tl.load(kept_row + ranks, mask=ranks < keep, other=0)
        # Rows that stay where they are, the window at least, cost no traffic.
        moves = (ranks < keep) & (sources != targets)
        source_blocks = tl.load(table_row + sources // BLOCK_SIZE, mask=moves, other=0)
        target_blocks = tl.load(table_row + targets // BLOCK_SIZE, mask=moves, other=0)
        source_rows = (
            source_blocks.to(tl.int64) * stride_block + (sources % BLOCK_SIZE) * stride_token
        )
        target_rows = (
            target_blocks.to(tl.int64) * stride_block + (targets % BLOCK_SIZE) * stride_token
        )
        mask = moves[:, None] & dim_mask
        data = tl.load(cache + source_rows[:, None] + dims[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(cache + target_rows[:, None] + dims[None, :], data, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def copy_blocks_kernel(
    key_cache,
    value_cache,
    sources,
    targets,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_value_block,
    stride_value_head,
    stride_value_token,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copy block `pid 0` of KV head `pid 1`: of K (`pid 2` 0) or of V."""
    g = tl.program_id(1).to(tl.int64)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    if tl.program_id(2) == 0:
        cache = key_cache + g * stride_key_head
        stride_block = stride_key_block.to(tl.int64)
        stride_token = stride_key_token.to(tl.int64)
    else:
        cache = value_cache + g * stride_value_head
        stride_block = stride_value_block.to(tl.int64)
        stride_token = stride_value_token.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)[None, :]
    for start in tl.static_range(0, BLOCK_SIZE, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (rows < BLOCK_SIZE) & (dims < HEAD_SIZE)
        places = rows * stride_token + dims
        data = tl.load(cache + source * stride_block + places, mask=mask)
        tl.store(cache + target * stride_block + places, data, mask=mask)


@triton.jit
def quantised(x, scale, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    """Return the bits of x / scale as an 8-bit float: to nearest, ties to even, at most `MOST`.

    The rounding uses integers, as in `csrc/cpu/fp8.h`, since not every device converts to every
    such type.
    """
    shift: tl.constexpr = 23 - MANTISSA
    magic: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    x = tl.div_rn(x.to(tl.float32), scale)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rest = tl.minimum(size, MOST)
    # A float addition rounds subnormal numbers at the right bit.
    anchor = tl.full(rest.shape, magic, tl.int32)
    summed = rest.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    small = summed.to(tl.int32, bitcast=True) - magic
    half = (1 << (shift - 1)) - 1 + ((rest >> shift) & 1)
    normal = (rest - ((127 - BIAS) << 23) + half) >> shift
    number = tl.where(rest < ((128 - BIAS) << 23), small, normal)
    return (((bits >> 24) & 0x80) | tl.where(size > 0x7F800000, 0x7F, number)).to(tl.uint8)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_rows_kernel(
    rows,
    cache,
    slot_mapping,
    scale,
    stride_in_token,
    stride_in_head,
    stride_block,
    stride_head,
    stride_token,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write `BLOCK` elements of token `pid 0` to its slot; negative slots are padding.

    With a `MANTISSA` the cache has bytes that hold 8-bit floats (`quantised`).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < NUM_KV_HEADS * HEAD_SIZE
    g = (index // HEAD_SIZE).to(tl.int64)
    d = index % HEAD_SIZE
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    row = tl.load(rows + token * stride_in_token + g * stride_in_head + d, mask=mask)
    if MANTISSA:
        row = quantised(row, scale, MANTISSA, BIAS, MOST)
    tl.store(cache + place + g * stride_head + d, row.to(cache.dtype.element_ty), mask=mask)
