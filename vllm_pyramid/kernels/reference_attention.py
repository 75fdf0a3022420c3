# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain PyTorch, one request at a time: a part of `reference.py`."""

from __future__ import annotations

import math

import torch

from vllm_pyramid.kernels.gather_tokens import check_head_tables, check_one_scale, gather_tokens
from vllm_pyramid.kernels.log_sum_exp import check_lse
from vllm_pyramid.kernels.records import AttentionBatch, Softmax


def paged_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    query, key_cache, value_cache = batch.query, batch.key_cache, batch.value_cache
    check_one_scale(batch.key_scales, batch.value_scales)
    seq_lens, skips = batch.seq_lens, batch.skips
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    check_head_tables(batch.block_table, key_cache.shape[1], sliding_window)
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    num_queries_per_kv = query.shape[1] // key_cache.shape[1]
    value_table = batch.block_table if batch.value_table is None else batch.value_table
    starts = batch.query_start_loc.tolist()
    for r, (seq_len, skip) in enumerate(zip(seq_lens.tolist(), skips.tolist(), strict=True)):
        q = query[starts[r] : starts[r + 1]].to(compute_dtype)
        num_queries = q.shape[0]
        if num_queries == 0:
            continue
        k = gather_tokens(key_cache, batch.block_table[r], skip, seq_len).to(compute_dtype)
        v = gather_tokens(value_cache, value_table[r], skip, seq_len).to(compute_dtype)
        k = k.repeat_interleave(num_queries_per_kv, dim=1)
        v = v.repeat_interleave(num_queries_per_kv, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * (softmax.scale * batch.key_scale)
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        key_pos = torch.arange(skip, seq_len, device=q.device)
        query_pos = torch.arange(seq_len - num_queries, seq_len, device=q.device)
        hidden = key_pos[None, :] > query_pos[:, None]
        if sliding_window:
            hidden |= key_pos[None, :] <= query_pos[:, None] - sliding_window
        sees_nothing = hidden.all(dim=1)
        logits.masked_fill_(hidden, -math.inf)
        if log_sum_exp is not None:
            log_sum_exp[starts[r] : starts[r + 1]] = logits.logsumexp(dim=-1).T.float()
        if sinks is not None:
            sink = sinks.to(compute_dtype)[:, None, None].expand(-1, num_queries, 1)
            logits = torch.cat([logits, sink], dim=-1)
        probs = logits.softmax(dim=-1)[..., : key_pos.numel()]
        probs = probs.masked_fill(sees_nothing[:, None], 0.0)  # not the NaN of an empty softmax
        found = torch.einsum("hqk,khd->qhd", probs, v) * batch.value_scale
        out[starts[r] : starts[r + 1]] = found.to(out.dtype)
