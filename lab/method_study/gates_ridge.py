# SPDX-License-Identifier: Apache-2.0
"""Ridge values: kept values change least so that the window's queries get the output they had.

With P the window's attention over the kept tokens, V their values and O the output over all of
them, `dV = P^T (P P^T + r I)^-1 (O - P V)`.
"""

from __future__ import annotations

import torch
from model import Evicted, Kept, LayerCache, Step


class Ridged(Evicted):
    """A way that evicts and changes the kept values, each KV head its own."""

    def __init__(self, kept: Kept, window: int, ridge: float) -> None:
        super().__init__(kept)
        self.window, self.ridge = window, ridge

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        places = self.kept[step.layer]
        queries = cache.queries[-self.window :].transpose(0, 1).unflatten(0, (len(places), -1))
        group = queries.shape[1]
        found = []
        for head, own in enumerate(places):
            keys, values = cache.keys[head], cache.values[head]
            changed = mended(queries[head] * step.scale, keys, values, own, self.ridge)
            one = slice(head, head + 1)
            mine = step.q[head * group : (head + 1) * group]
            part = Step(step.layer, mine, step.k[one], step.v[one], step.scale)
            found.append(part.over(keys[None, own], changed[None]))
        return torch.cat(found)


def mended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    ridge: float,
) -> torch.Tensor:
    """Return the changed values of the kept tokens, `[L, D]`.

    Args:
        queries: `[H / G, W, D]` of the last W tokens, the scale in them. keys, values: `[T, D]`.
            kept: `[L]` places, the last W tokens among them. ridge: r, of the mean of the diagonal.
    """
    tokens, window = len(keys), queries.shape[1]
    own = torch.arange(tokens - window, tokens)[:, None]
    logits = (queries @ keys.T).masked_fill(torch.arange(tokens) > own, -torch.inf)
    wanted = (logits.softmax(dim=-1) @ values).flatten(0, 1)
    attention = logits[..., kept].softmax(dim=-1).flatten(0, 1)  # P
    gram = attention @ attention.T
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    missing = wanted - attention @ values[kept]
    return values[kept] + attention.T @ torch.linalg.solve(gram, missing)
