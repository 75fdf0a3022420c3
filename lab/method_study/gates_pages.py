# SPDX-License-Identifier: Apache-2.0
"""Attention to some pages of a whole cache: five scores of a page, and how much each one finds.

A query looks at its own tokens, the first page, the last ones, and those with the best scores. A
page's score is a softmax over the pages in each query head, averaged over the heads of a KV head,
whose pages are one choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from model import LayerCache, Step

PAGE = 16
_RECENT = 4  # pages, and what does not fill one
_FOLLOWING = 64  # queries that choose a page's representatives
_REPRESENTATIVES = 2

# Pages `[G, P, 16, D]`, queries `[G, H / G, n, D]` with the scale in them, the cache:
# `[G, H / G, n, P]`.
Scorer = Callable[[torch.Tensor, torch.Tensor, LayerCache], torch.Tensor]


def _product(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ghnd,gpd->ghnp", queries, rows)


def box(pages: torch.Tensor, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Return Quest's bound of the page's greatest product (arXiv:2406.10774)."""
    above = _product(queries.clamp(min=0), pages.amax(dim=2))
    return above + _product(queries.clamp(max=0), pages.amin(dim=2))


def spread(pages: torch.Tensor, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Return the product with the mean and, by magnitude, with the standard deviation."""
    deviation = pages.std(dim=2, correction=0)
    return _product(queries, pages.mean(dim=2)) + _product(queries.abs(), deviation)


def mean(pages: torch.Tensor, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Return the product with the page's mean key."""
    return _product(queries, pages.mean(dim=2))


def representative(pages: torch.Tensor, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Return the greatest product with the two keys that the queries behind them liked best.

    After InfLLM (arXiv:2402.04617): a key's worth is its mean product with the queries that follow.
    """
    heads, count = pages.shape[:2]
    summed = cache.queries.unflatten(1, (heads, -1)).sum(dim=2).cumsum(dim=0)  # [T, G, D]
    here = torch.arange(len(summed))
    then = (here + _FOLLOWING).clamp(max=len(summed) - 1)
    following = (summed[then] - summed) / (then - here).clamp(min=1)[:, None, None]
    worth = torch.einsum("tgd,gtd->gt", following, cache.keys)[:, : count * PAGE]
    best = worth.unflatten(1, (count, PAGE)).topk(_REPRESENTATIVES, dim=-1).indices
    keys = pages.gather(2, best[..., None].expand(-1, -1, -1, pages.shape[-1]))
    return torch.stack([_product(queries, rows) for rows in keys.unbind(2)]).amax(dim=0)


def exact(pages: torch.Tensor, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Return the page's attention itself, which takes all keys: the most that a score can do."""
    logits = torch.einsum("ghnd,gpsd->ghnps", queries, pages)
    return logits.logsumexp(dim=-1)


SCORERS: dict[str, Scorer] = {
    scorer.__name__: scorer for scorer in (box, spread, mean, representative, exact)
}


def _paged(step: Step, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the full pages of keys, and the queries by KV head, scaled."""
    heads, tokens, size = cache.keys.shape
    count = tokens // PAGE
    pages = cache.keys[:, : count * PAGE].reshape(heads, count, PAGE, size)
    return pages, step.q.unflatten(0, (heads, -1)) * step.scale


def _fixed(count: int) -> torch.Tensor:
    """Return which of the full pages are seen in any case."""
    fixed = torch.zeros(count, dtype=torch.bool)
    fixed[0] = True
    fixed[-_RECENT:] = True
    return fixed


def _chosen(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Return the pages of each KV head and query, `[G, n, P]` bool; the fixed ones count too."""
    pages = scores.shape[-1]
    fixed = _fixed(pages)
    rated = scores.masked_fill(fixed, -torch.inf).softmax(dim=-1).mean(dim=1)
    free = max(1, round(share * pages) - int(fixed.sum()))
    best = rated.masked_fill(fixed, -1.0).topk(free, dim=-1).indices
    return torch.zeros(rated.shape, dtype=torch.bool).scatter_(-1, best, True) | fixed


class Pages:
    """A way that attends to a share of the prompt's pages, chosen anew by each query."""

    def __init__(self, scorer: str, share: float) -> None:
        self.scorer, self.share = SCORERS[scorer], share

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        pages, queries = _paged(step, cache)
        chosen = _chosen(self.scorer(pages, queries, cache), self.share)
        seen = chosen.repeat_interleave(PAGE, dim=-1)
        rest = torch.ones(*seen.shape[:-1], cache.keys.shape[1] - seen.shape[-1], dtype=torch.bool)
        seen = torch.cat([seen, rest], dim=-1).repeat_interleave(queries.shape[1], dim=0)
        return step.over(cache.keys, cache.values, seen)


class Survey:
    """The whole cache, and what part of its attention each score's pages would have had.

    Attributes:
        recalls: by score and share, a number a layer: of the attention to pages that are not seen
            in any case, the part on those chosen; summed over heads, averaged over queries.
    """

    def __init__(self, shares: tuple[float, ...], skip: int) -> None:
        self.shares, self.skip = shares, skip
        self.recalls: dict[tuple[str, float], list[float]] = {}

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        pages, queries = _paged(step, cache)
        queries = queries[:, :, self.skip - 1 :]
        of_pages = exact(pages, queries, cache)
        free = ~_fixed(pages.shape[1])
        weights = of_pages.softmax(dim=-1) * free  # [G, H / G, n, P]
        for name, scorer in SCORERS.items():
            scores = of_pages if scorer is exact else scorer(pages, queries, cache)
            for share in self.shares:
                chosen = _chosen(scores, share)[:, None] & free
                had = (weights * chosen).sum(dim=(0, 1, 3)) / weights.sum(dim=(0, 1, 3))
                self.recalls.setdefault((name, share), []).append(float(had.mean()))
        return step.over(cache.keys, cache.values)
