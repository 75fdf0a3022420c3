# SPDX-License-Identifier: Apache-2.0
"""Attention to the best keys alone, in plain PyTorch: part of `reference.py`'s contract.

KCache (arXiv:2404.18057, section 3): all of K is at hand, V is far away, so a query's softmax is
taken over all keys and only the V rows of its N largest weights are fetched.
"""

from __future__ import annotations

import torch

__all__ = ["check_value_rows", "topn_attention"]


def topn_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    top_ns: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    renormalize: bool = False,
    value_rows: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """`reference.paged_attention` of a batch in which requests may use their best keys alone.

    Of every query and query HEAD of request r the `top_ns[r]` visible keys with the largest
    attention logits count, the lower position where logits are equal; a query that sees no more
    keys than that uses all. Query heads that share a KV head choose separately, as in the paper.
    Other arguments: see `paged_attention`. `value_cache` may be in another memory, `[P, G, N, D]`
    with strides of its own.

    Args:
        top_ns: `[R]` int32. 0, or at least the visible keys of the request's last query: the
            request is attended to by `paged_attention`.
        renormalize: the weights of the chosen keys are made to sum to 1; otherwise they are what
            they are in the softmax over all keys and the sink (as the paper writes it).
        value_rows: `[R]` int64 or None. The rows of V (of D elements) that were needed are ADDED:
            with `top_ns` one a chosen key, query and query head, else the keys that the request's
            queries see, once a KV head.

    Raises:
        ValueError: `top_ns` or `value_rows` has another shape or dtype, or a negative entry.
    """
    from vllm_pyramid.ops.reference import gather_tokens, paged_attention

    requests, kv_heads = seq_lens.shape[0], key_cache.shape[1]
    if top_ns.dtype != torch.int32 or top_ns.shape != (requests,):
        raise ValueError(
            f"top_ns must be int32 [{requests}], got {top_ns.dtype} {tuple(top_ns.shape)}"
        )
    if value_rows is not None:
        check_value_rows(value_rows, requests)
    group = query.shape[1] // kv_heads
    starts = query_start_loc.tolist()
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
            paged_attention(
                out[starts[r] : starts[r + 1]],
                query[starts[r] : starts[r + 1]],
                key_cache,
                value_cache,
                block_table[r : r + 1],
                torch.tensor([0, count], dtype=torch.int32),
                seq_lens[r : r + 1],
                skips[r : r + 1],
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                sinks=sinks,
                compute_dtype=compute_dtype,
            )
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
            logits = (k @ q[i, :, :, None])[..., 0] * scale
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
            out[starts[r] + i] = (weights[..., None] * rows).sum(dim=1).to(out.dtype)
            if value_rows is not None:
                value_rows[r] += best.numel()


def check_value_rows(value_rows: torch.Tensor, requests: int) -> None:
    """Raise ValueError unless it is contiguous int64 `[requests]`."""
    if value_rows.dtype != torch.int64 or value_rows.shape != (requests,):
        raise ValueError(
            f"value_rows must be int64 [{requests}], got {value_rows.dtype} "
            f"{tuple(value_rows.shape)}"
        )
    if requests > 1 and value_rows.stride(0) != 1:
        raise ValueError(f"value_rows must be contiguous, got stride {value_rows.stride(0)}")
