# SPDX-License-Identifier: Apache-2.0
"""A way of attending: pages of what is kept, chosen by the project's own page scorers.

It is the rule of the engine (docs/select.md) for each token behind the prompt: its own page, the
first and the latest pages, and of the rest those with the best scores, as many as a policy plans.
A later question reads pages alone too, unless it is said to be a prompt: engines compute it as one,
with attention to everything.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import Kept, LayerCache, Step, attention

from vllm_pyramid.methods.pages import SelectPages
from vllm_pyramid.plan import IntArray

PAGE = 16


class Selected:
    """A way that reads some pages, of everything or of what an eviction has kept.

    Args:
        pages: that each layer reads at most. asked: tokens behind the prompt that are one too.
    """

    def __init__(
        self, attend: SelectPages, pages: IntArray, kept: Kept | None = None, asked: int = 0
    ) -> None:
        self.part, self.pages, self.kept, self.asked = attend, pages, kept, asked

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        keys, values = cache.keys, cache.values
        if self.kept is not None:
            rows = torch.stack(self.kept[step.layer])
            heads = torch.arange(len(rows))[:, None]
            keys, values = keys[heads, rows], values[heads, rows]
        keys, values = torch.cat([keys, step.k], dim=1), torch.cat([values, step.v], dim=1)
        seen = self._seen(step, keys).repeat_interleave(len(step.q) // len(keys), dim=0)
        return attention(step.q[None], keys[None], values[None], step.scale, seen[None])[0]

    def _seen(self, step: Step, keys: torch.Tensor) -> torch.Tensor:
        """Return which tokens each query reads, `[G, n, L + n]` bool."""
        heads, total, _ = keys.shape
        places = torch.arange(total - step.q.shape[1], total)
        own, page_of = places // PAGE, torch.arange(total) // PAGE
        causal = torch.arange(total) <= places[:, None]
        budget = int(self.pages[step.layer])
        if budget > int(own.max()):
            return causal.expand(heads, -1, -1)
        scores = self._scores(step, keys, own)
        page = torch.arange(scores.shape[-1])
        always = page < self.part.sink_pages(PAGE)
        always = always | (page > own[:, None] - self.part.recent_pages(PAGE))
        before = page < own[:, None]
        wanted = scores.masked_fill(always, torch.inf).masked_fill(~before, -torch.inf)
        best = wanted.topk(budget - 1, dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & before
        # The page that is not full yet has no score, and is the own one where it is seen at all.
        chosen = F.pad(chosen, (0, int(page_of[-1]) + 1 - chosen.shape[-1]))
        asked = torch.arange(len(places))[:, None] < self.asked
        return (chosen[..., page_of] | (page_of == own[:, None]) | asked) & causal

    def _scores(self, step: Step, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the combined weights of the full pages, `[G, n, P]`; 0 from the own one on."""
        heads, total, _ = keys.shape
        full = total // PAGE
        pages = keys[:, : full * PAGE].unflatten(1, (full, PAGE)).transpose(0, 1)
        queries = self.part.scorer.extend(step.q.transpose(0, 1)).unflatten(1, (heads, -1))
        logits = torch.einsum("nghe,pge->ghnp", queries, self.part.scorer.summarise(pages))
        hidden = torch.arange(full) >= own[:, None]
        weights = (logits * step.scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return weights.mean(dim=1) if self.part.combine == "mean" else weights.amax(dim=1)
