# SPDX-License-Identifier: Apache-2.0
"""How much attention evicted tokens would have had: the truth, and an estimate from few numbers.

For each 64 evicted tokens of a KV head, in the order of their places, a mean and a standard
deviation of their keys stay. If the keys were normal with these, the sum of `exp(q . k)` over them
would be `64 exp(q . mean + (q^2 . variance) / 2)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import Evicted, Kept, LayerCache, Step

SUMMARISED = 64


class Metered(Evicted):
    """A way that evicts, and measures with the queries that it has itself.

    Attributes:
        true, estimated: `[n]` a layer: the evicted tokens' share of the attention, mean over heads.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        self.true: list[torch.Tensor] = []
        self.estimated: list[torch.Tensor] = []

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        kept = self.kept[step.layer]
        group, n = len(step.q) // len(kept), step.q.shape[1]
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        shares: list[list[torch.Tensor]] = [[], []]
        for head, places in enumerate(kept):
            queries = step.q[head * group : (head + 1) * group] * step.scale
            left = torch.ones(cache.keys.shape[1], dtype=torch.bool)
            left[places] = False
            evicted = cache.keys[head, left]
            own = (queries @ step.k[head].T).masked_fill(later, -torch.inf)
            had = torch.cat([queries @ cache.keys[head, places].T, own], dim=-1).logsumexp(-1)
            lost = (queries @ evicted.T).logsumexp(-1)
            for found, what in zip(shares, (lost, estimate(queries, evicted)), strict=True):
                found.append((what - had).sigmoid())
        for found, into in zip(shares, (self.true, self.estimated), strict=True):
            into.append(torch.cat(found).mean(dim=0))
        return super().attend(step, cache)


def estimate(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the estimate of `log(sum(exp(queries . keys)))`, `[..., n]`.

    Args:
        queries: `[..., n, D]`, the scale of the logits in them. keys: `[E, D]`, E > 0.
    """
    parts = -(-len(keys) // SUMMARISED)
    padded = F.pad(keys, (0, 0, 0, parts * SUMMARISED - len(keys)))
    counts = torch.full((parts,), float(SUMMARISED))
    counts[-1] = len(keys) - (parts - 1) * SUMMARISED
    grouped = padded.unflatten(0, (parts, SUMMARISED))
    means = grouped.sum(dim=1) / counts[:, None]
    squares = grouped.square().sum(dim=1) / counts[:, None]
    variances = (squares - means.square()).clamp(min=0)
    logits = queries @ means.T + 0.5 * (queries.square() @ variances.T) + counts.log()
    return logits.logsumexp(dim=-1)
