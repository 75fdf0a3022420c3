# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that summarises pages, and the same for a kernel that does more."""

from __future__ import annotations

import triton
import triton.language as tl

# A part of a batch may begin at any address in these tensors.
OF_REQUESTS = ["block_table", "starts", "seq_lens", "skips"]


@triton.jit
def summarise_page(
    summaries,
    key_cache,
    block,
    g,
    page,
    skip,
    length,
    stride_key_block,
    stride_key_head,
    stride_key_token,
    stride_summary_block,
    stride_summary_head,
    KIND: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Summarise the positions `skip .. length - 1` of a page, which lies in `block`."""
    offsets, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    positions = page * BLOCK_SIZE + offsets
    inside = (offsets < BLOCK_SIZE) & (positions >= skip) & (positions < length)
    mask = inside[:, None] & (dims < HEAD_SIZE)[None, :]
    block, g = block.to(tl.int64), g.to(tl.int64)
    source = key_cache + block * stride_key_block + g * stride_key_head + dims[None, :]
    k = tl.load(source + (offsets * stride_key_token)[:, None], mask=mask, other=0.0)
    k = k.to(tl.float32)
    target = summaries + block * stride_summary_block + g * stride_summary_head + dims
    if KIND == "box":
        one = tl.max(tl.where(mask, k, float("-inf")), 0)
        two = tl.min(tl.where(mask, k, float("inf")), 0)
        wrong = tl.max((k != k).to(tl.int32), 0) > 0  # of NaN and a number these take the number
        one, two = tl.where(wrong, float("nan"), one), tl.where(wrong, float("nan"), two)
    else:
        count = tl.sum(inside.to(tl.float32), 0)
        one = tl.sum(k, 0) / count
        apart = tl.where(mask, k - one[None, :], 0.0)
        two = tl.sqrt(tl.sum(apart * apart, 0) / count)
    dtype = summaries.dtype.element_ty
    tl.store(target, one.to(dtype), mask=dims < HEAD_SIZE)
    tl.store(target + HEAD_SIZE, two.to(dtype), mask=dims < HEAD_SIZE)


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
    g = tl.program_id(0) % NUM_KV_HEADS
    start, length, skip = tl.load(starts + r), tl.load(seq_lens + r), tl.load(skips + r)
    first = tl.maximum(start, skip)
    page = first // BLOCK_SIZE + tl.program_id(1)
    if (first >= length) | (page * BLOCK_SIZE >= length):
        return
    block = tl.load(block_table + r.to(tl.int64) * stride_table + page)
    summarise_page(
        summaries, key_cache, block, g, page, skip, length,
        stride_key_block, stride_key_head, stride_key_token,
        stride_summary_block, stride_summary_head,
        KIND, HEAD_SIZE, BLOCK_D, BLOCK_N, BLOCK_SIZE,
    )  # fmt: skip
