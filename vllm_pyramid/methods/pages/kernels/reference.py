# SPDX-License-Identifier: Apache-2.0
"""Page selection in plain PyTorch, a part of `reference.py`: one page or row at a time."""

from __future__ import annotations

import math

import torch

from vllm_pyramid.kernels.gather_tokens import gather_tokens
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.pages.kernels.checks import (
    check_choosing,
    check_scoring,
    check_selecting,
    check_starts,
    check_summaries,
    scores_to_fill,
    selected_counts,
    selection_to_fill,
)
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists, PageSelection

__all__ = [
    *("choose_pages", "extend_query", "score_pages", "select_pages"),
    *("summarise_keys", "summarise_pages"),
]


def summarise_keys(keys: torch.Tensor, kind: str) -> torch.Tensor:
    """Summarise the keys of a page, `[n, ..., D]`, as `[..., rows * D]`."""
    if kind == "box":
        return torch.cat([keys.amax(dim=0), keys.amin(dim=0)], dim=-1)
    if kind == "spread":
        return torch.cat([keys.mean(dim=0), keys.std(dim=0, correction=0)], dim=-1)
    raise ValueError(f"no summaries of kind {kind!r}")


def extend_query(query: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what a summary of this kind is multiplied with: `[..., D]` to `[..., rows * D]`."""
    if kind == "box":
        return torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
    if kind == "spread":
        return torch.cat([query, query.abs()], dim=-1)
    return query


def summarise_pages(
    summaries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    kind: str,
    max_pages: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    check_summaries(summaries, key_cache, kind)
    size = key_cache.shape[2]
    check_starts(starts, seq_lens)
    rows = zip(starts.tolist(), seq_lens.tolist(), skips.tolist(), strict=True)
    for r, (start, length, skip) in enumerate(rows):
        for page in range(max(start, skip) // size, -(-length // size)):
            begin, end = max(skip, page * size), min(length, (page + 1) * size)
            if begin < end and start < length:
                keys = gather_tokens(key_cache, block_table[r], begin, end).to(compute_dtype)
                found = summarise_keys(keys, kind).to(summaries.dtype)
                summaries[int(block_table[r, page])] = found


def score_pages(
    batch: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    *,
    kind: str,
    combine: str = "mean",
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    check_scoring(batch, softmax, pool, kind, combine)
    first, visible = pages_of(batch)
    heads = pool.shape[1]
    out = scores_to_fill(batch, heads, out).fill_(-math.inf)
    query = extend_query(batch.query.to(compute_dtype), kind).unflatten(1, (heads, -1))
    for s, request in enumerate(batch.requests.tolist()):
        candidates = visible[s] - 1
        if not candidates:
            continue
        blocks = batch.block_table[request, first[s] : first[s] + candidates].long()
        entries = pool[blocks].to(compute_dtype)  # [pages, G, ...]
        entries = entries if entries.dim() == 4 else entries[:, :, None]
        logits = torch.einsum("ghd,pgnd->ghpn", query[s], entries) * softmax.scale * batch.key_scale
        if softmax.soft_cap:
            logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
        logits = logits.amax(dim=-1)
        if softmax.sinks is not None:
            sinks = softmax.sinks.to(compute_dtype).view(heads, -1, 1)
            logits = torch.cat([logits, sinks], dim=-1)
        weights = logits.softmax(dim=-1)[..., :candidates]
        reduced = weights.mean(dim=1) if combine == "mean" else weights.amax(dim=1)
        out[s, :, :candidates] = reduced.float()
    return out


def select_pages(
    batch: PageBatch,
    scores: torch.Tensor,
    budgets: torch.Tensor,
    *,
    sinks: int = 0,
    recent: int = 1,
    max_selected: int | None = None,
    out: PageSelection | None = None,
) -> PageSelection:
    first, visible = pages_of(batch)
    rows, heads, size = len(first), scores.shape[1], batch.block_size
    check_selecting(scores, rows, sinks, recent)
    counts = selected_counts(batch, budgets, sinks, recent).tolist()
    most = max(counts, default=0)
    if out is None:
        width = most if max_selected is None else max_selected
        out = PageSelection.empty(rows, heads, width, scores.device)
    out = selection_to_fill(rows, heads, out)
    if most > out.pages.shape[2]:
        raise ValueError(f"a row chooses {most} pages, more than the {out.pages.shape[2]} of out")
    positions, skips, requests = (
        x.tolist() for x in (batch.positions, batch.skips, batch.requests)
    )
    out.block_table.zero_()
    out.pages.fill_(-1)
    for s, count in enumerate(counts):
        hidden, pages = skips[s] % size, visible[s]
        wanted = scores[s, :, : pages - 1].clone()
        wanted[:, : max(sinks, int(hidden > 0))] = math.inf
        wanted[:, max(0, pages - recent) :] = math.inf
        order = wanted.sort(dim=-1, descending=True, stable=True).indices
        best = order[:, : count - 1].sort(dim=-1).values
        own = torch.full((heads, 1), pages - 1, device=best.device)
        chosen = first[s] + torch.cat([best, own], dim=1)
        out.pages[s, :, :count] = chosen.to(torch.int32)
        out.block_table[s, :, :count] = batch.block_table[requests[s]][chosen]
        out.counts[s] = count
        out.seq_lens[s] = (count - 1) * size + positions[s] % size + 1
        out.skips[s] = hidden
    return out


def choose_pages(
    batch: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    budgets: torch.Tensor,
    scores: torch.Tensor,
    out: PageLists,
    *,
    kind: str,
    combine: str = "mean",
    sinks: int = 0,
    recent: int = 1,
    key_cache: torch.Tensor | None = None,
    names: tuple[int, int] = (1, 0),
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    check_choosing(batch, softmax, pool, scores, out, kind, combine, sinks, recent)
    size, heads = batch.block_size, pool.shape[1]
    if key_cache is not None:
        ends = batch.positions + 1
        starts = torch.where(ends % size == 0, (ends - size).clamp(min=0), ends)
        table = batch.block_table[batch.requests.long()]
        summarise_pages(pool, key_cache, table, starts, ends, batch.skips, kind=kind)
    found = score_pages(
        batch, softmax, pool, kind=kind, combine=combine, compute_dtype=compute_dtype
    )
    counts = selected_counts(batch, budgets, sinks, recent)
    _, visible = pages_of(batch)
    whole = counts == torch.tensor(visible, device=counts.device)
    wrong = found.isnan().any(dim=2) & ~whole[:, None]
    found.masked_fill_(found.isnan().any(dim=2)[..., None], 0.0)
    out.unranked.logical_or_(wrong.any(dim=1))
    out.miscounted.logical_or_(counts != budgets)
    width = out.block_table.shape[2]
    chosen = select_pages(
        batch, found, budgets, sinks=sinks, recent=recent, max_selected=max(width, 1)
    )
    of_head = torch.arange(heads, dtype=torch.int32, device=pool.device)[:, None] * names[1]
    named, group = chosen.block_table * names[0] + of_head, scores.shape[1] // heads
    for s, count in enumerate(counts.tolist()):
        out.block_table[s, :, :count] = named[s, :, :count]
        if count < visible[s]:
            scores[s, ::group, : visible[s] - 1] = found[s, :, : visible[s] - 1]
    out.seq_lens.copy_(chosen.seq_lens)
    out.head_lens.copy_(chosen.seq_lens[:, None].expand(-1, heads))
    out.skips.copy_(chosen.skips)


def pages_of(batch: PageBatch) -> tuple[list[int], list[int]]:
    """Return the first page that each row sees, and how many; ValueError: a row sees none."""
    first, visible = [], []
    for s, (position, skip) in enumerate(
        zip(batch.positions.tolist(), batch.skips.tolist(), strict=True)
    ):
        if not 0 <= skip <= position:
            raise ValueError(f"skips of row {s} is {skip}, outside 0 .. positions = {position}")
        first.append(skip // batch.block_size)
        visible.append(position // batch.block_size - first[-1] + 1)
    return first, visible
