# SPDX-License-Identifier: Apache-2.0
"""Attention, and attention that reads shared prefixes once: a part of `reference.py`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vllm_pyramid.kernels.contract import FEWEST_KEYS, FEWEST_ROWS, MOST_ROWS, THIN_ROWS, TILE_KEYS
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


class SharedPrefix(NamedTuple):
    """The requests of a group, ascending, and the positions `skip .. end - 1` that they share."""

    requests: tuple[int, ...]
    skip: int
    end: int

    @property
    def saved(self) -> int:
        """Reads of a key that the group saves."""
        return (len(self.requests) - 1) * (self.end - self.skip)


def shared_prefixes(
    batch: AttentionBatch, softmax: Softmax, fewest_keys: int = FEWEST_KEYS
) -> list[SharedPrefix]:
    """Find the groups that `shared_attention` forms, in no particular order."""
    if fewest_keys < 1:
        raise ValueError(f"fewest_keys is {fewest_keys}, below 1")
    if softmax.sliding_window or batch.block_table.dim() == 3:  # or a list of each KV head
        return []
    block_size = batch.key_cache.shape[2]
    heads = batch.query.shape[1] // batch.key_cache.shape[1]
    starts, skips = batch.query_start_loc.tolist(), batch.skips.tolist()
    tables = {}  # the entries that a request may share, by request
    for r, seq_len in enumerate(batch.seq_lens.tolist()):
        queries = starts[r + 1] - starts[r]
        pages = (seq_len - queries) // block_size
        if queries and queries * heads <= MOST_ROWS and pages * block_size > skips[r]:
            tables[r] = batch.block_table[r, skips[r] // block_size : pages].tolist()

    def best(requests: list[int], equal: int) -> list[SharedPrefix]:
        """Return the best groups of requests of one skip whose first `equal` entries agree."""
        rows = [tables[r] for r in requests]
        while equal < min(map(len, rows)) and len({row[equal] for row in rows}) == 1:
            equal += 1
        skip = skips[requests[0]]
        keys = (skip // block_size + equal) * block_size - skip
        as_one = SharedPrefix(tuple(requests), skip, skip + keys // TILE_KEYS * TILE_KEYS)
        counts = [(starts[r + 1] - starts[r]) * heads for r in requests]
        enough_rows = sum(counts) >= FEWEST_ROWS or max(counts) <= THIN_ROWS
        own = [as_one] if enough_rows and as_one.end - skip >= fewest_keys else []
        longer = [r for r in requests if len(tables[r]) > equal]
        within = [
            group
            for entry in sorted({tables[r][equal] for r in longer})
            for group in best_of([r for r in longer if tables[r][equal] == entry], equal + 1)
        ]
        better = sum(group.saved for group in within) > sum(group.saved for group in own)
        return within if better else own

    def best_of(requests: list[int], equal: int) -> list[SharedPrefix]:
        return best(requests, equal) if len(requests) > 1 else []

    found = []
    for skip in sorted(set(skips)):
        found += best_of([r for r in tables if skips[r] == skip], 0)
    return found


def shared_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    log_sum_exp: torch.Tensor | None = None,
    fewest_keys: int = FEWEST_KEYS,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Attend to each group's keys with all its queries, then join them with each request's own."""
    paged_attention(out, batch, softmax, log_sum_exp=log_sum_exp, compute_dtype=compute_dtype)
    check_one_scale(batch.key_scales, batch.value_scales)
    if log_sum_exp is not None:
        check_lse(log_sum_exp, batch.query)
    starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for group in shared_prefixes(batch, softmax, fewest_keys):
        rows = {r: slice(starts[r], starts[r + 1]) for r in group.requests}
        queries = {r: batch.query[where].to(compute_dtype) for r, where in rows.items()}
        lengths = [len(query) for query in queries.values()]
        shared = _part(
            torch.cat([*queries.values()]), batch, softmax, group.requests[0], group.skip, group.end
        )
        parts = zip(*(part.split(lengths) for part in shared), strict=True)
        for (r, query), (sums, lse) in zip(queries.items(), parts, strict=True):
            own_sums, own_lse = _part(query, batch, softmax, r, group.end, seq_lens[r])
            joined = torch.logaddexp(lse, own_lse)
            total = joined
            if softmax.sinks is not None:
                total = torch.logaddexp(joined, softmax.sinks.to(compute_dtype).expand_as(joined))
            found = sums * (lse - total).exp()[..., None]
            found += own_sums * (own_lse - total).exp()[..., None]
            out[rows[r]] = (found * batch.value_scale).to(out.dtype)
            if log_sum_exp is not None:
                log_sum_exp[rows[r]] = joined.float()


def _part(
    query: torch.Tensor, batch: AttentionBatch, softmax: Softmax, r: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the last `[Q, H, D]` queries to the positions `start .. end - 1` of request r.

    Return the weighted mean of V, `[Q, H, D]`, and the log-sum-exp, `[Q, H]`.
    """
    per_kv = query.shape[1] // batch.key_cache.shape[1]
    seq_len, num_queries = int(batch.seq_lens[r]), query.shape[0]
    k, v = (
        gather_tokens(cache, batch.block_table[r], start, end)
        .to(query.dtype)
        .repeat_interleave(per_kv, dim=1)
        for cache in (batch.key_cache, batch.value_cache)
    )
    logits = torch.einsum("qhd,khd->qhk", query, k) * (softmax.scale * batch.key_scale)
    if softmax.soft_cap:
        logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
    if end == seq_len:
        key_pos = torch.arange(start, end, device=query.device)
        query_pos = torch.arange(seq_len - num_queries, seq_len, device=query.device)
        logits.masked_fill_((key_pos > query_pos[:, None])[:, None], -math.inf)
    lse = logits.logsumexp(dim=-1)
    return torch.einsum("qhk,khd->qhd", (logits - lse[..., None]).exp(), v), lse
