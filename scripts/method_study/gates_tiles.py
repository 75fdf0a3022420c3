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


def density(cache: LayerCache, scale: float, top_p: float) -> float:
    """Return the share of a layer's causal tiles that are taken, the mean over its query heads.

    The tokens that fill no tile are left out.
    """
    tokens, heads, size = cache.queries.shape
    rows = tokens // TILE
    parts, length = TILE // _STRIDE, rows * TILE
    queries = cache.queries[:length].transpose(0, 1).reshape(heads, length // _STRIDE, _STRIDE, -1)
    keys = cache.keys[:, :length].reshape(len(cache.keys), length // _STRIDE, _STRIDE, size)
    keys = keys.flip(2).flatten(2)  # an antidiagonal of 16 x 16 is one product
    later = torch.ones(len(keys[0]), len(keys[0]), dtype=torch.bool).triu(1)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    always = torch.eye(rows, dtype=torch.bool)
    always[:, 0] = True
    taken = 0.0
    for head in range(heads):
        products = queries[head].flatten(1) @ keys[head * len(keys) // heads].T
        weights = (products * (scale / _STRIDE)).masked_fill(later, -torch.inf).softmax(dim=-1)
        worth = weights.reshape(rows, parts, rows, parts).sum(dim=(1, 3))
        share = worth / worth.sum(dim=-1, keepdim=True)
        first = share.masked_fill(always, 2.0)  # taken before all others
        order = first.argsort(dim=-1, descending=True)
        sorted_share = share.gather(1, order)
        before = sorted_share.cumsum(dim=-1) - sorted_share
        chosen = torch.zeros_like(causal).scatter_(1, order, before < top_p)
        taken += float(((chosen | always) & causal).sum() / causal.sum())
    return taken / heads
