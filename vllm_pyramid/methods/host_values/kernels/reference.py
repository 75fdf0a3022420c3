# SPDX-License-Identifier: Apache-2.0
"""Attention to the best keys alone, and copies of pages, in plain PyTorch."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.gather_tokens import check_one_scale, check_one_table, gather_tokens
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.reference_attention import paged_attention
from vllm_pyramid.methods.host_values.kernels import Choosers

__all__ = ["check_value_rows", "copy_pages", "topn_attention"]


def topn_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    top_ns: torch.Tensor,
    *,
    renormalize: bool = False,
    value_rows: torch.Tensor | None = None,
    choosers: Choosers | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    del choosers
    check_one_scale(batch.key_scales, batch.value_scales)
    check_one_table(batch.block_table)
    query, seq_lens, skips = batch.query, batch.seq_lens, batch.skips
    key_cache, value_cache, block_table = batch.key_cache, batch.value_cache, batch.block_table
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    requests, kv_heads = seq_lens.shape[0], key_cache.shape[1]
    if top_ns.dtype != torch.int32 or top_ns.shape != (requests,):
        raise ValueError(
            f"top_ns must be int32 [{requests}], got {top_ns.dtype} {tuple(top_ns.shape)}"
        )
    if value_rows is not None:
        check_value_rows(value_rows, requests)
    group = query.shape[1] // kv_heads
    starts = batch.query_start_loc.tolist()
    for r, (length, skip, top_n) in enumerate(
        zip(seq_lens.tolist(), skips.tolist(), top_ns.tolist(), strict=True)
    ):
        if top_n < 0:
            raise ValueError(f"top_n of request {r} is negative")
        q = query[starts[r] : starts[r + 1]].to(compute_dtype)
        count = q.shape[0]
        if count == 0:
            continue

        def first(position: int, skip: int = skip) -> int:
            return max(skip, position - sliding_window + 1) if sliding_window else skip

        if top_n == 0 or top_n >= length - first(length - 1):
            alone = AttentionBatch(
                query[starts[r] : starts[r + 1]],
                key_cache,
                value_cache,
                block_table[r : r + 1],
                torch.tensor([0, count], dtype=torch.int32),
                seq_lens[r : r + 1],
                skips[r : r + 1],
                key_scale=batch.key_scale,
                value_scale=batch.value_scale,
            )
            rows = out[starts[r] : starts[r + 1]]
            paged_attention(rows, alone, softmax, compute_dtype=compute_dtype)
            if value_rows is not None:
                value_rows[r] += max(0, length - first(length - count)) * kv_heads
            continue
        for i in range(count):
            position = length - count + i
            begin = first(position)
            if begin > position:
                out[starts[r] + i] = 0
                continue
            k = gather_tokens(key_cache, block_table[r], begin, position + 1).to(compute_dtype)
            v = gather_tokens(value_cache, block_table[r], begin, position + 1).to(compute_dtype)
            k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [H, n, D]
            logits = (k @ q[i, :, :, None])[..., 0] * (softmax.scale * batch.key_scale)
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_n]
            if renormalize:
                weights = logits.gather(1, best).softmax(dim=-1)
            else:
                if sinks is not None:
                    logits = torch.cat([logits, sinks.to(compute_dtype)[:, None]], dim=-1)
                weights = logits.softmax(dim=-1).gather(1, best)
            rows = v.gather(1, best[..., None].expand(-1, -1, v.shape[2]))
            found = (weights[..., None] * rows).sum(dim=1) * batch.value_scale
            out[starts[r] + i] = found.to(out.dtype)
            if value_rows is not None:
                value_rows[r] += best.numel()


def check_value_rows(value_rows: torch.Tensor, requests: int) -> None:
    if value_rows.dtype != torch.int64 or value_rows.shape != (requests,):
        raise ValueError(
            f"value_rows must be int64 [{requests}], got {value_rows.dtype} "
            f"{tuple(value_rows.shape)}"
        )
    if requests > 1 and value_rows.stride(0) != 1:
        raise ValueError(f"value_rows must be contiguous, got stride {value_rows.stride(0)}")


def copy_pages(
    target: torch.Tensor, source: torch.Tensor, block_table: torch.Tensor, places: torch.Tensor
) -> None:
    pages, rows, entries = places.long().unbind(1)
    target, source = target.view(torch.uint8), source.view(torch.uint8)
    target[pages] = source[block_table[rows, entries].long()]
