# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch versions of every kernel: the contract and the oracle.

Three back ends implement these signatures: this file, C++ (`ops/cpu.py`) and Triton
(`ops/triton_*.py`). This one is written to be read; it gathers what it needs and computes in
float32 (or float64 when asked), one request at a time.

Shape legend: R requests, T query tokens of all requests, H query heads, G KV heads, Q = H / G,
D head size, N tokens of a block, P physical blocks, M table entries a request.

Cache layout: `key_cache` and `value_cache` are views `[P, G, N, D]` with unit stride in D and any
other strides (K and V usually share one allocation). Token p of request r lives in block
`block_table[r, p // N]`, row `p % N`. Entries of the table below `skips[r] // N` are stale and are
never read.

Retention is right-aligned: a request with `skip` > 0 holds its survivors in positions
`skip .. prompt_len - 1` and later tokens behind them, so attention is that of the positions
`skip .. seq_len - 1`. `skip` may be any number; whole blocks below it belong to somebody else.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from vllm_pyramid.ops.recall import WindowStatistics, kept_mass, window_statistics
from vllm_pyramid.ops.reference_mass import MASS_KINDS, add_key_mass, check_lse
from vllm_pyramid.ops.topn import topn_attention

__all__ = [
    "GQA_REDUCTIONS",
    "MASS_KINDS",
    "POOLINGS",
    "WindowStatistics",
    "add_key_mass",
    "compact",
    "gather_tokens",
    "kept_mass",
    "paged_attention",
    "recent_mass",
    "reshape_and_cache",
    "select",
    "topn_attention",
    "window_scores",
]

GQA_REDUCTIONS = ("mean", "max", "sum")
POOLINGS = ("avg", "max", "none")


def gather_tokens(
    cache_PGND: torch.Tensor, block_row: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    """Copy the tokens `start .. end - 1` of one request out of the cache: `[end - start, G, D]`."""
    block_size = cache_PGND.shape[2]
    positions = torch.arange(start, end, device=cache_PGND.device)
    blocks = block_row[positions // block_size].long()
    return cache_PGND[blocks, :, positions % block_size]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write new tokens into the cache.

    Args:
        key: `[T, G, D]`. value: same.
        key_cache: `[P, G, N, D]`. value_cache: same.
        slot_mapping: `[T]` int64, `block * N + row`; negative entries are skipped (padding).
    """
    block_size = key_cache.shape[2]
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    key_cache[slots // block_size, :, slots % block_size] = key[: len(valid)][valid].to(
        key_cache.dtype
    )
    value_cache[slots // block_size, :, slots % block_size] = value[: len(valid)][valid].to(
        value_cache.dtype
    )


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Causal attention of prefill chunks and decode steps over the paged cache.

    The queries of request r are rows `query_start_loc[r] .. query_start_loc[r + 1] - 1` and are its
    last tokens: query row i of m stands at position `seq_lens[r] - m + i` and sees the positions
    `max(skips[r], that - sliding_window + 1) .. that`. (Sliding windows count cache positions, so
    they are exact only where nothing was evicted; eviction on such layers is refused elsewhere.)

    Args:
        out: `[T, H, D]`, written. May have any dtype; unit stride in D.
        query: `[T, H, D]`.
        block_table: `[R, M]` int32. query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32, tokens including the new ones and the skipped ones.
        skips: `[R]` int32, positions below which nothing is visible; 0 where nothing was evicted.
        sliding_window: tokens visible to a query, itself included; 0 for all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0 for none.
        sinks: `[H]` logits of an extra key without a value, added to the softmax, or None.
        log_sum_exp: `[T, H]` float32, written where it is given: natural logarithm of the sum of
            exp(logit) over what each query sees, scaled and capped, without the sink; -inf where it
            sees nothing. `add_key_mass`, `window_scores` and `recent_mass` take it and need one
            pass over K less.
    """
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    num_queries_per_kv = query.shape[1] // key_cache.shape[1]
    starts = query_start_loc.tolist()
    for r, (seq_len, skip) in enumerate(zip(seq_lens.tolist(), skips.tolist(), strict=True)):
        q = query[starts[r] : starts[r + 1]].to(compute_dtype)
        num_queries = q.shape[0]
        if num_queries == 0:
            continue
        k = gather_tokens(key_cache, block_table[r], skip, seq_len).to(compute_dtype)
        v = gather_tokens(value_cache, block_table[r], skip, seq_len).to(compute_dtype)
        k = k.repeat_interleave(num_queries_per_kv, dim=1)
        v = v.repeat_interleave(num_queries_per_kv, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        key_pos = torch.arange(skip, seq_len, device=q.device)
        query_pos = torch.arange(seq_len - num_queries, seq_len, device=q.device)
        hidden = key_pos[None, :] > query_pos[:, None]
        if sliding_window:
            hidden |= key_pos[None, :] <= query_pos[:, None] - sliding_window
        logits.masked_fill_(hidden, -math.inf)
        if log_sum_exp is not None:
            log_sum_exp[starts[r] : starts[r + 1]] = logits.logsumexp(dim=-1).T.float()
        if sinks is not None:
            sink = sinks.to(compute_dtype)[:, None, None].expand(-1, num_queries, 1)
            logits = torch.cat([logits, sink], dim=-1)
        probs = logits.softmax(dim=-1)[..., : key_pos.numel()]
        out[starts[r] : starts[r + 1]] = torch.einsum("hqk,khd->qhd", probs, v).to(out.dtype)


def window_scores(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: torch.Tensor,
    prompt_lens: torch.Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    gqa_reduce: str = "mean",
    pooling: str = "avg",
    kernel_size: int = 5,
    max_prompt_len: int | None = None,
    statistics: bool = False,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, WindowStatistics]:
    """Importance of every prompt token before the observation window (SnapKV, PyramidKV sec. 4.2).

    Of each request, the softmax over ALL its keys of the last `window` prompt queries (causal
    inside the window, float32) is summed over those queries, reduced over the query heads of a KV
    head, and pooled along the positions (stride 1, zero padding counted for `avg`, as the papers'
    code does).

    Args:
        query: `[T, H, D]` queries of this step.
        query_ends: `[R]` int32; the window's queries of r are rows `query_ends[r] - window ..
            query_ends[r] - 1` of `query`, and stand at the end of its prompt.
        prompt_lens: `[R]` int32, each > window; the whole prompt is in the cache, nothing skipped.
        gqa_reduce: one of `GQA_REDUCTIONS`. pooling: one of `POOLINGS`. kernel_size: odd.
        max_prompt_len: max(prompt_lens) if the caller knows it, so that a device need not be asked.
        statistics: also return what the mass looks like before it is pooled, for the allocators
            that follow it: mass, entropy and Gini coefficient of each KV head as
            `recall.WindowStatistics` defines them (PyramidKV's ablation, Table 4). Costs a sort.
        log_sum_exp: `[T, H]` float32, what `paged_attention` wrote for the window's queries, with
            no sliding window; other rows are not read. Saves one of two passes. None: found here.

    Returns:
        `[R, G, max(prompt_lens) - window]` float32; -inf behind `prompt_lens[r] - window`. With
        `statistics` a pair: the same, and a `WindowStatistics` of `[R, G]` float32.
    """
    num_kv_heads = key_cache.shape[1]
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    lens = prompt_lens.tolist()
    shape = (len(lens), num_kv_heads, max(lens) - window)
    out = torch.full(shape, -math.inf, device=query.device)
    unpooled = torch.zeros(shape, dtype=compute_dtype, device=query.device)
    for r, (end, n) in enumerate(zip(query_ends.tolist(), lens, strict=True)):
        q = query[end - window : end].to(compute_dtype)
        k = gather_tokens(key_cache, block_table[r], 0, n).to(compute_dtype)
        q = q.unflatten(1, (num_kv_heads, -1))
        logits = torch.einsum("wgqd,kgd->gqwk", q, k) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        key_pos = torch.arange(n, device=q.device)
        query_pos = torch.arange(n - window, n, device=q.device)
        logits.masked_fill_(key_pos[None, :] > query_pos[:, None], -math.inf)
        if log_sum_exp is None:
            lse = logits.logsumexp(dim=-1)
        else:
            lse = (
                log_sum_exp[end - window : end].to(compute_dtype).T.unflatten(0, (num_kv_heads, -1))
            )
        mass = (logits - lse[..., None]).exp()[..., : n - window].sum(dim=2)  # [G, Q, n - window]
        if gqa_reduce == "max":
            mass = mass.amax(dim=1)
        else:
            mass = mass.mean(dim=1) if gqa_reduce == "mean" else mass.sum(dim=1)
        unpooled[r, :, : n - window] = mass
        if pooling != "none":
            pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
            mass = pool(mass, kernel_size, stride=1, padding=kernel_size // 2)
        out[r, :, : n - window] = mass.float()
    if statistics:
        return out, window_statistics(unpooled, prompt_lens, window=window)
    return out


def recent_mass(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    recents: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    distance_weight: float,
    soft_cap: float = 0.0,
    log_sum_exp: torch.Tensor | None = None,
    max_context: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention that a request's recent queries pay to its context (PyramidInfer, section 4.1).

    Of each request, the causal softmax over all visible keys is averaged over the last `recents[r]`
    queries, whose weights rise linearly from 1 to `distance_weight` (their sum is divided out), and
    summed over the query heads of a KV head. The context are the keys right before those queries;
    keys before the context take part in the softmax, but are not reported.

    Args:
        query: `[T, H, D]` queries of this step.
        query_ends: `[R]` int32; the recent queries of r are rows `query_ends[r] - recents[r] ..
            query_ends[r] - 1` of `query`, and stand at the end of its tokens.
        seq_lens, skips: `[R]` int32, as in `paged_attention`.
        recents: `[R]` int32, at least 1. contexts: `[R]` int32, keys reported, in positions
            `seq_lens[r] - recents[r] - contexts[r] .. seq_lens[r] - recents[r] - 1`.
        log_sum_exp: `[T, H]` float32, what `paged_attention` wrote for the recent queries, without
            a sliding window. Saves one of two passes over K. None: found here.
        max_context: max(contexts) if the caller knows it.

    Returns:
        `[R, G, max(contexts)]` float32; 0 behind `contexts[r]`.
    """
    num_kv_heads = key_cache.shape[1]
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    columns = int(contexts.max()) if max_context is None else max_context
    out = torch.zeros((seq_lens.shape[0], num_kv_heads, columns), device=query.device)
    rows = zip(
        query_ends.tolist(), seq_lens.tolist(), skips.tolist(), recents.tolist(), contexts.tolist(),
        strict=True,
    )  # fmt: skip
    for r, (end, seq_len, skip, recent, context) in enumerate(rows):
        q = query[end - recent : end].to(compute_dtype).unflatten(1, (num_kv_heads, -1))
        k = gather_tokens(key_cache, block_table[r], skip, seq_len).to(compute_dtype)
        logits = torch.einsum("wgqd,kgd->gqwk", q, k) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        key_pos = torch.arange(skip, seq_len, device=q.device)
        query_pos = torch.arange(seq_len - recent, seq_len, device=q.device)
        logits.masked_fill_(key_pos[None, :] > query_pos[:, None], -math.inf)
        weights = torch.linspace(1.0, distance_weight, recent, dtype=compute_dtype, device=q.device)
        if log_sum_exp is None:
            lse = logits.logsumexp(dim=-1)
        else:
            lse = (
                log_sum_exp[end - recent : end].to(compute_dtype).T.unflatten(0, (num_kv_heads, -1))
            )
        probs = (logits - lse[..., None]).exp() * (weights / weights.sum())[:, None]
        first = seq_len - recent - context - skip
        out[r, :, :context] = probs[..., first : first + context].sum(dim=(1, 2)).float()
    return out


def select(
    scores: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    max_keep: int | None = None,
) -> torch.Tensor:
    """Which prompt positions each KV head keeps: sinks, the window, and the best of the rest.

    Ties go to the lower position, so the result is a function of the scores alone.

    Args:
        scores: `[R, G, >= max(prompt_lens) - window]` float32, no NaN.
        keeps: `[R]` int32 tokens kept a head, `sinks + window <= keeps[r] <= prompt_lens[r]`.
        max_keep: max(keeps) if the caller knows it.

    Returns:
        `[R, G, max(keeps)]` int32 positions, ascending; -1 behind `keeps[r]`.
    """
    lens, counts = prompt_lens.tolist(), keeps.tolist()
    num_kv_heads = scores.shape[1]
    out = torch.full((len(lens), num_kv_heads, max(counts)), -1, dtype=torch.int32)
    for r, (n, keep) in enumerate(zip(lens, counts, strict=True)):
        candidates = scores[r, :, : n - window].clone()
        candidates[:, :sinks] = math.inf
        order = candidates.sort(dim=-1, descending=True, stable=True).indices
        best = order[:, : keep - window].sort(dim=-1).values
        tail = torch.arange(n - window, n, device=best.device).expand(num_kv_heads, -1)
        out[r, :, :keep] = torch.cat([best, tail], dim=1).to(torch.int32).cpu()
    return out.to(scores.device)


def compact(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kept: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    max_keep: int | None = None,
) -> None:
    """Move the kept rows of K and V to the tail of the prompt's range, in place.

    Survivor i of r (in ascending order) goes to position `prompt_lens[r] - keeps[r] + i`, which is
    never below its own: walking from the last survivor down overwrites nothing still needed. Bits
    are moved, not values.

    Args:
        kept: `[R, G, >= max(keeps)]` int32 from `select`; entries behind `keeps[r]` are not read.
    """
    block_size = key_cache.shape[2]
    for r, (n, keep) in enumerate(zip(prompt_lens.tolist(), keeps.tolist(), strict=True)):
        source = kept[r, :, :keep].long()  # [G, keep]
        target = torch.arange(n - keep, n, device=source.device).expand_as(source)
        heads = torch.arange(source.shape[0], device=source.device)[:, None]
        table = block_table[r].long()
        for cache in (key_cache, value_cache):
            rows = cache[table[source // block_size], heads, source % block_size]
            cache[table[target // block_size], heads, target % block_size] = rows
