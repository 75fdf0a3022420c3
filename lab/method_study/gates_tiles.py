# SPDX-License-Identifier: Apache-2.0
"""Which part of a prefill's tiles would be computed, if each row of tiles chose its own.

XAttention (arXiv:2503.16428): a tile's worth is estimated from sums over antidiagonals with a
stride; each row of tiles takes the fewest whose worths reach a share of their sum. The first tile
and the diagonal one are always taken.
"""

from __future__ import annotations

import torch
from model import LayerCache

TILE = 128
_STRIDE = 16


def chosen_tiles(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    top_p: float,
    *,
    together: bool = False,
) -> torch.Tensor:
    """Return which tiles each row of tiles takes, `[H, rows, rows]`, none of those after it.

    Args:
        queries: `[H, tokens, D]`. keys: `[G, tokens, D]`. Tokens that fill no tile are left out.
        together: whether the query heads of a KV head take the same tiles, by their mean worths.
    """
    heads, tokens, size = queries.shape
    rows = tokens // TILE
    parts, length = TILE // _STRIDE, rows * TILE
    queries = queries[:, :length].reshape(heads, length // _STRIDE, _STRIDE, -1)
    keys = keys[:, :length].reshape(len(keys), length // _STRIDE, _STRIDE, size)
    keys = keys.flip(2).flatten(2)  # an antidiagonal of 16 x 16 is one product
    later = torch.ones(len(keys[0]), len(keys[0]), dtype=torch.bool).triu(1)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    always = torch.eye(rows, dtype=torch.bool)
    always[:, 0] = True
    shares = []
    for head in range(heads):
        products = queries[head].flatten(1) @ keys[head * len(keys) // heads].T
        weights = (products * (scale / _STRIDE)).masked_fill(later, -torch.inf).softmax(dim=-1)
        worth = weights.reshape(rows, parts, rows, parts).sum(dim=(1, 3))
        shares.append(worth / worth.sum(dim=-1, keepdim=True))
    if together:
        of_groups = torch.stack(shares).unflatten(0, (len(keys), -1)).mean(dim=1)
        shares = list(of_groups.repeat_interleave(heads // len(keys), dim=0))
    taken = []
    for share in shares:
        first = share.masked_fill(always, 2.0)  # taken before all others
        order = first.argsort(dim=-1, descending=True)
        sorted_share = share.gather(1, order)
        before = sorted_share.cumsum(dim=-1) - sorted_share
        chosen = torch.zeros_like(causal).scatter_(1, order, before < top_p)
        taken.append((chosen | always) & causal)
    return torch.stack(taken)


def density_of(taken: torch.Tensor) -> float:
    """Return the share of the causal tiles that are taken, the mean over heads."""
    rows = taken.shape[-1]
    return float(taken.sum()) / (len(taken) * rows * (rows + 1) / 2)


def density(cache: LayerCache, scale: float, top_p: float) -> float:
    """Return the share of a layer's causal tiles that are taken, the mean over its query heads."""
    return density_of(chosen_tiles(cache.queries.transpose(0, 1), cache.keys, scale, top_p))
