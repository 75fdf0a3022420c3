# SPDX-License-Identifier: Apache-2.0
"""`topn_attention` on Triton: scratch memory and launches (see `triton_ops.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from vllm_pyramid.ops.contract import AttentionBatch, Softmax
from vllm_pyramid.ops.topn import check_value_rows
from vllm_pyramid.ops.triton_attention_ops import paged_attention
from vllm_pyramid.ops.triton_checks import check_cache, check_query
from vllm_pyramid.ops.triton_config import decode_config, padded_head_size
from vllm_pyramid.ops.triton_topn import (
    topn_choose_kernel,
    topn_logits_kernel,
    topn_values_kernel,
)

LOG2_E = 1.4426950408889634


def topn_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    top_ns: torch.Tensor,
    *,
    renormalize: bool = False,
    value_rows: torch.Tensor | None = None,
    choosers: torch.Tensor | None = None,
    max_top_n: int | None = None,
) -> None:
    """See `Ops.topn_attention`. `value_cache` may be memory of the host that the device addresses.

    Args:
        choosers: `[S, 2]` int32, request and index of each query that chooses: all queries of the
            requests whose `top_ns` is above 0 and below what their last query sees. They are read
            back from the device if None.
        max_top_n: at least the largest of their `top_ns`; read back if None.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    query, key_cache, value_cache = batch.query, batch.key_cache, batch.value_cache
    block_table, query_start_loc = batch.block_table, batch.query_start_loc
    seq_lens, skips, max_seq_len = batch.seq_lens, batch.skips, batch.max_seq_len
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    check_cache(key_cache, value_cache)
    group = check_query(query, key_cache)
    num_requests = seq_lens.shape[0]
    if top_ns.dtype != torch.int32 or top_ns.shape != (num_requests,):
        raise ValueError(
            f"top_ns must be int32 [{num_requests}], got {top_ns.dtype} {tuple(top_ns.shape)}"
        )
    if value_rows is not None:
        check_value_rows(value_rows, num_requests)
    queries = query_start_loc[1 : num_requests + 1] - query_start_loc[:num_requests]
    seen = seq_lens - skips
    if sliding_window:
        seen = seen.clamp(max=sliding_window)
    chooses = (top_ns > 0) & (top_ns < seen) & (queries > 0)
    # Requests that choose show nothing here: no V of theirs is read.
    paged_attention(out, replace(batch, seq_lens=torch.where(chooses, skips, seq_lens)), softmax)
    if choosers is None:
        choosers = _choosers(chooses, queries)
    if max_top_n is None:
        max_top_n = int(torch.where(chooses, top_ns, 0).max().item()) if num_requests else 0
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    if value_rows is not None:
        whole = seq_lens - skips
        if sliding_window:
            whole = whole.clamp(max=sliding_window + queries - 1)
        exact = (~chooses & (queries > 0)) * whole.clamp(min=0) * num_kv_heads
        value_rows += exact
        if choosers.shape[0]:
            r = choosers[:, 0].long()
            ends = (seq_lens - skips - queries)[r] + choosers[:, 1] + 1
            if sliding_window:
                ends = ends.clamp(max=sliding_window)
            taken = torch.minimum(top_ns[r], ends.clamp(min=0)) * query.shape[1]
            value_rows.index_add_(0, r, taken.long())
    if not choosers.shape[0]:
        return
    if max_seq_len is None:
        max_seq_len = block_table.shape[1] * block_size
    num_choosers, num_heads, device = choosers.shape[0], query.shape[1], query.device
    columns, rows = max_seq_len, num_choosers * num_heads
    logits = torch.empty(rows, columns, dtype=torch.float32, device=device)
    best = torch.empty(rows, max_top_n, dtype=torch.int32, device=device)
    weights = torch.empty(rows, max_top_n, dtype=torch.float32, device=device)
    totals = torch.empty(rows, dtype=torch.float32, device=device)
    config = decode_config(head_size, query.element_size(), group)
    window = {"HAS_WINDOW": sliding_window > 0}
    wide = value_cache.element_size() == 4  # half as many rows, so that they stay in registers
    tiles = triton.cdiv(columns, config["BLOCK_K"])
    topn_logits_kernel[(num_choosers * num_kv_heads, tiles)](
        logits, query, key_cache, block_table, query_start_loc, seq_lens, skips, choosers,
        softmax.scale * batch.key_scale * LOG2_E, soft_cap * LOG2_E, sliding_window, columns,
        *query.stride()[:2], *key_cache.stride()[:3], block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        HAS_SOFT_CAP=soft_cap != 0, **window, **config,
    )  # fmt: skip
    block = min(2048, max(128, triton.next_power_of_2(columns)))
    topn_choose_kernel[(rows,)](
        best, weights, totals, logits, query_start_loc, seq_lens, skips, top_ns, choosers,
        sinks if sinks is not None else seq_lens, sliding_window, columns, max_top_n,
        NUM_HEADS=num_heads, BLOCK=block, HAS_SINKS=sinks is not None, RENORMALIZE=renormalize,
        **window, num_warps=8 if block >= 1024 else 4,
    )  # fmt: skip
    topn_values_kernel[(rows,)](
        out, best, weights, totals, value_cache, block_table, query_start_loc, seq_lens, skips,
        top_ns, choosers, batch.value_scale, sliding_window, max_top_n,
        *out.stride()[:2], *value_cache.stride()[:3], block_table.stride(0),
        NUM_HEADS=num_heads, GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_D=padded_head_size(head_size), BLOCK_N=16 if wide else 32, **window, num_warps=4,
    )  # fmt: skip


def _choosers(chooses: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """`[S, 2]`: every query of the requests that choose."""
    pairs = [
        (r, i)
        for r, (wanted, count) in enumerate(zip(chooses.tolist(), queries.tolist(), strict=True))
        if wanted
        for i in range(count)
    ]
    return torch.tensor(pairs, dtype=torch.int32, device=chooses.device).view(-1, 2)
