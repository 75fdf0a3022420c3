# SPDX-License-Identifier: Apache-2.0
"""Attention of a prompt to chosen tiles of its keys: the choice, and lists of pages for kernels.

Tile number i holds the positions `128 i .. 128 i + 127`, as queries and as keys. The queries of a
tile that share a KV head attend to a list of tiles of keys: those below their own whole, their own
causally. A list is a block table, and a tile of queries with a KV head is a request, so
`paged_attention` serves it on every back end, and reads nothing that is not listed.

The choice is XAttention's (arXiv:2503.16428): sums over antidiagonals of stride 16 estimate what a
tile is worth, and the fewest tiles are taken whose worths reach a share of their sum. Its query
heads choose by themselves; here those of a KV head choose together, by their mean.

Shape legend as in `kernels/records.py`; S tiles of queries, L tiles of keys up to the last of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.plan.tiles import TILE

STRIDE = 16
_PARTS = TILE // STRIDE


def choose_tiles(
    query: torch.Tensor, key_cache: torch.Tensor, blocks: torch.Tensor, scale: float, top_p: float
) -> torch.Tensor:
    """Return which tiles of keys each tile of queries takes: `[S, G, L]` bool.

    A tile takes the first tile and its own in any case; these and the best of the others reach
    `top_p` of what all up to its own are worth. No operand's shape depends on S, so a tile of
    queries chooses the same, whichever tiles are given along with it.

    Args:
        query: `[S * TILE, H, D]`, the queries of the last S tiles.
        key_cache: `[P, G, N, D]`, N divides `TILE`.
        blocks: `[L * TILE / N]`, the blocks of the sequence up to the last of the queries.
        scale: of the products, that of the keys included.
        top_p: above 0; from 1 on a tile takes all up to its own.
    """
    heads, kv_heads, size = query.shape[1], key_cache.shape[1], key_cache.shape[3]
    count, total = len(query) // TILE, len(blocks) * key_cache.shape[2] // TILE
    taken = torch.zeros(count, kv_heads, total, dtype=torch.bool)
    first = total - count
    if top_p >= 1:
        for tile in range(count):
            taken[tile, :, : first + tile + 1] = True
        return taken
    # An antidiagonal of 16 x 16 is one product of long rows.
    flipped = query.unflatten(0, (count, _PARTS, STRIDE)).flip(2)
    rows = flipped.unflatten(3, (kv_heads, -1)).permute(3, 0, 4, 1, 2, 5)
    rows = rows.float().reshape(kv_heads, count, -1, STRIDE * size)
    for head in range(kv_heads):  # one at a time, which bounds the memory
        keys = key_cache[blocks.long(), head].float().view(-1, STRIDE * size)
        for tile in range(count):
            last = first + tile
            logits = (rows[head, tile] @ keys[: (last + 1) * _PARTS].T) * (scale / STRIDE)
            chosen = _best(logits.view(heads // kv_heads, _PARTS, -1), top_p)
            taken[tile, head, : last + 1] = chosen
    return taken


def _best(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the tiles that a tile of queries takes: `[L]` bool.

    `logits`, `[H / G, 8, 8 L]`, are of its antidiagonals with those of the keys up to its own;
    changed.
    """
    hidden = torch.ones(_PARTS, _PARTS, dtype=torch.bool).triu(1)
    logits[..., -_PARTS:].masked_fill_(hidden, -torch.inf)
    worth = logits.softmax(dim=-1).unflatten(2, (-1, _PARTS)).sum(dim=(1, 3))
    share = (worth / worth.sum(dim=-1, keepdim=True)).mean(dim=0)
    ranked = share.clone()
    ranked[0] = ranked[-1] = 2.0  # before all others
    order = ranked.argsort(descending=True, stable=True)
    sorted_share = share[order]
    before = sorted_share.cumsum(dim=0) - sorted_share
    chosen = torch.zeros_like(share, dtype=torch.bool).scatter_(0, order, before < top_p)
    chosen[0] = chosen[-1] = True
    return chosen


def attend_tiles(
    ops: Ops,
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    blocks: torch.Tensor,
    taken: torch.Tensor,
) -> None:
    """Attend from S tiles of queries of one request to the tiles that they have taken.

    Args:
        out: `[S * TILE, H, D]`, written.
        batch: whose `query` is `[S * TILE, H, D]`, and whose caches and scales are read; a page of
            a cache must hold its KV heads one behind the other, as the CPU back end lays them out.
        softmax: without a sliding window.
        blocks, taken: as of `choose_tiles`; each tile has taken its own.

    Raises:
        ValueError: shapes do not fit, or the layer has a sliding window.
        RuntimeError: the heads of a page do not follow one another.
    """
    count, kv_heads, total = taken.shape
    size = batch.key_cache.shape[2]
    if softmax.sliding_window:
        raise ValueError("a list of tiles has no sliding window")
    if TILE % size or len(blocks) * size != total * TILE or len(batch.query) != count * TILE:
        raise ValueError(
            f"{len(batch.query)} queries and {len(blocks)} blocks of {size} tokens are not "
            f"{count} tiles of queries and {total} of keys, {TILE} tokens each"
        )
    if softmax.sinks is None:
        _attend_heads(ops, out, batch, softmax, blocks, taken, range(kv_heads))
        return
    for head, sinks in enumerate(softmax.sinks.chunk(kv_heads)):  # which a request's heads have
        own = replace(softmax, sinks=sinks)
        _attend_heads(ops, out, batch, own, blocks, taken, range(head, head + 1))


def _attend_heads(
    ops: Ops,
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    blocks: torch.Tensor,
    taken: torch.Tensor,
    kv: range,
) -> None:
    """Attend with some KV heads, as one batch of requests of one KV head."""
    count, kv_heads, _ = taken.shape
    pages, _, size, width = batch.key_cache.shape
    own = taken[:, kv.start : kv.stop].transpose(0, 1).flatten(0, 1)  # [heads * S, L]
    lists = own.sum(dim=1)
    # Numbers of the taken tiles in ascending order; those behind a list's end are never read.
    tiles = (~own).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(lists.max())]
    of_heads = torch.tensor(kv).repeat_interleave(count)[:, None, None]
    table = blocks.long().view(-1, TILE // size)[tiles] * kv_heads + of_heads
    grouped = (kv_heads, batch.query.shape[1] // kv_heads)
    query = batch.query.unflatten(1, grouped)[:, kv.start : kv.stop]
    query = query.transpose(0, 1).flatten(0, 1)  # [heads * S * TILE, H / G, D]
    found = torch.empty(query.shape, dtype=out.dtype)
    requests = len(own)
    ops.paged_attention(
        found,
        AttentionBatch(
            query,
            batch.key_cache.view(pages * kv_heads, 1, size, width),
            batch.value_cache.view(len(batch.value_cache) * kv_heads, 1, size, width),
            table.flatten(1).to(torch.int32),
            torch.arange(0, (requests + 1) * TILE, TILE, dtype=torch.int32),
            (lists * TILE).to(torch.int32),
            torch.zeros(requests, dtype=torch.int32),
            key_scale=batch.key_scale,
            value_scale=batch.value_scale,
        ),
        softmax,
    )
    rows = out.unflatten(1, grouped)[:, kv.start : kv.stop]
    rows.copy_(found.unflatten(0, (len(kv), -1)).transpose(0, 1))
