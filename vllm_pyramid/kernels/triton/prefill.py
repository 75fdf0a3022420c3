# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of causal prefill attention.

Shape legend as in `records.py`; loads and logits as in `decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_pyramid.kernels.triton.decode import OF_REQUESTS
from vllm_pyramid.kernels.triton.device_functions import (
    LOG2_E,
    dot,
    natural_log_sum,
    soft_capped,
    with_sink,
)


@triton.jit(do_not_specialize=["stride_head_table"], do_not_specialize_on_alignment=OF_REQUESTS)
def prefill_kernel(
    out,
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
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_VALUE_TABLE: tl.constexpr,
):
    """Attend for `BLOCK_M` queries (tile `pid 0`, the last first) of request `pid 2`, head `pid 1`.

    Requests with one query are left to `decode_kernel`, so that the arithmetic of a request's
    decode step does not depend on whether a prefill shares the step.
    """
    head = tl.program_id(1).to(tl.int64)
    r = tl.program_id(2)
    start = tl.load(query_start_loc + r)
    num_queries = tl.load(query_start_loc + r + 1) - start
    # The tiles that see the longest context start first, so the launch does not end on them.
    row_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if (num_queries <= 1) | (row_start >= num_queries):
        return
    seq_len = tl.load(seq_lens + r)
    first_query = seq_len - num_queries
    first = tl.load(skips + r)
    if HAS_WINDOW:
        first = tl.maximum(first, first_query + row_start - sliding_window + 1)
    last = tl.minimum(seq_len, first_query + row_start + BLOCK_M)

    rows = tl.minimum(row_start + tl.arange(0, BLOCK_M), num_queries - 1)
    query_positions = first_query + rows
    tokens = (start + rows).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_SIZE
    q = tl.load(
        query + tokens[:, None] * stride_query_token + head * stride_query_head + dims[None, :],
        mask=dim_mask[None, :],
        other=0.0,
    )
    g = head // GROUP
    table_row = block_table + r.to(tl.int64) * stride_table
    table_row += (head // GROUP).to(tl.int64) * stride_head_table
    key_base = key_cache + g * stride_key_head + dims[None, :]
    value_base = value_cache + g * stride_value_head + dims[None, :]
    value_row = value_table + r.to(tl.int64) * stride_value_table

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for tile in range(first // BLOCK_K, tl.cdiv(last, BLOCK_K)):
        positions = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        visible = (positions >= first)[None, :] & (positions[None, :] <= query_positions[:, None])
        if HAS_WINDOW:
            visible &= positions[None, :] > query_positions[:, None] - sliding_window
        positions = tl.minimum(tl.maximum(positions, first), last - 1)
        blocks = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
        in_block = (positions % BLOCK_SIZE).to(tl.int64)
        k = tl.load(
            key_base + (blocks * stride_key_block + in_block * stride_key_token)[:, None],
            mask=dim_mask[None, :],
            other=0.0,
        ).to(q.dtype)
        logits = dot(q, tl.trans(k))
        logits *= scale
        if HAS_SOFT_CAP:
            logits = soft_capped(logits, soft_cap)
        logits = tl.where(visible, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        # A row may see no key of this tile, nor of the tiles before it.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - reference_max[:, None])
        shrink = tl.exp2(running_max - reference_max)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        if HAS_VALUE_TABLE:
            blocks = tl.load(value_row + positions // BLOCK_SIZE).to(tl.int64)
        v = tl.load(
            value_base + (blocks * stride_value_block + in_block * stride_value_token)[:, None],
            mask=dim_mask[None, :],
            other=0.0,
        ).to(q.dtype)
        acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
        running_max = new_max

    inside = row_start + tl.arange(0, BLOCK_M) < num_queries
    if HAS_LSE:
        # Rows behind the last query repeat it.
        lse = natural_log_sum(running_max, running_sum)
        tl.store(log_sum_exp + tokens * tl.num_programs(1) + head, lse, mask=inside)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        _, running_sum, shrink = with_sink(running_max, running_sum, sink)
        acc *= shrink[:, None]
    acc = acc * value_scale / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    tl.store(
        out + tokens[:, None] * stride_out_token + head * stride_out_head + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & dim_mask[None, :],
    )
