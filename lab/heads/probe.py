# SPDX-License-Identifier: Apache-2.0
"""Which heads look far back: probes for masks that let the other heads stream.

Echo and induction (RazorAttention, arXiv:2407.15891, section 3.2), on the rotated queries and keys
of one layer: over random tokens, several times over, how much a head attends to earlier copies of
its own token, and to the tokens that came after them.

Mean attention (kvpress's `duo_attention_on_the_fly`): how far back the mean query of a layer looks
if every key is the mean key, so that position alone decides.

Shape legend: L layers, T tokens, W the last tokens of them, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from vllm_pyramid.step.rotary import Rotary

LENGTH = 500  # of kvpress's probe


@dataclass(frozen=True)
class Repeated:
    """Random tokens: at least 2 `copies` of `period` tokens."""

    period: int = 256
    copies: int = 4

    def __post_init__(self) -> None:
        """Raise ValueError for fewer than two tokens or copies."""
        if self.period < 2 or self.copies < 2:
            raise ValueError(
                f"{self.copies} copies of {self.period} tokens show no head that looks back: "
                "take at least 2 of each"
            )

    def tokens(self, ids: range, seed: int = 0) -> list[int]:
        """Return `period * copies` of the ordinary `ids`; those of a copy are all different."""
        return random.Random(seed).sample(ids, self.period) * self.copies

    def echo_and_induction(
        self, queries: torch.Tensor, keys: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two shares of each head's attention, `[H]` float32: 0 to 1.

        The mean over the queries behind the first copy of what goes to earlier copies of the
        query's token (echo), and to the tokens right behind those (induction).

        Args:
            queries: `[W, H, D]` of the last tokens, more than one of them behind the first copy.
            keys: `[G, T, D]` of all `period * copies` tokens. scale: of the products.
        """
        total, window = self.period * self.copies, len(queries)
        if keys.shape[1] != total or not 0 < window <= total:
            raise ValueError(
                f"the probe has {total} tokens, and there are {keys.shape[1]} keys and {window} "
                "queries"
            )
        places = torch.arange(total - window, total)
        behind = places >= self.period
        places, grouped = places[behind], queries[behind].unflatten(1, (len(keys), -1))
        logits = torch.einsum("wgqd,gtd->gqwt", grouped.float(), keys.float()) * scale
        seen = torch.arange(total)
        gap = places[:, None] - seen
        weights = logits.masked_fill(gap < 0, -torch.inf).softmax(dim=-1).flatten(0, 1)
        copies = (gap > 0) & (gap % self.period == 0)
        # Nothing stands before the first token, which is a sink of many heads.
        after = (gap > 0) & ((gap + 1) % self.period == 0) & (seen > 0)
        echo, induction = ((weights * mask).sum(-1).mean(-1) for mask in (copies, after))
        return echo, induction


def of_kv_heads(scores: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return what each KV head's highest query head has: `[..., H]` to `[..., G]`."""
    return scores.unflatten(-1, (num_kv_heads, -1)).amax(dim=-1)


def retrieval_heads(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return which KV heads keep everything: `[L, G]` bool, the `count` highest of `[L, G]` scores.

    The earlier layer and head wins where two are equal.
    """
    if not 0 <= count <= scores.numel():
        raise ValueError(f"{count} of {scores.numel()} KV heads cannot be chosen")
    best = scores.flatten().sort(descending=True, stable=True).indices[:count]
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    chosen[best] = True
    return chosen.view(scores.shape)


def mean_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    rotary: Rotary,
    scale: float,
    length: int = LENGTH,
) -> torch.Tensor:
    """Return the area under each head's cumulative attention, `[H]` float32.

    Without rotary embedding the prompt's queries and keys are averaged; the mean query at the last
    of `length` positions attends to the mean key at each of them. 1 is attention to the first
    token, 0.5 to all alike, near 0 to the last ones.

    Args:
        queries: `[T, H, D]`. keys: `[G, T, D]`. rotary: what turned both, from position 0 on.
    """
    here = torch.arange(keys.shape[1])
    query = rotary.turn_back(queries.float(), here).mean(dim=0)
    key = rotary.turn_back(keys.float().transpose(0, 1), here).mean(dim=0)
    places = torch.arange(length)
    cos, sin = rotary.at(places)
    turned = rotary.turn(key[:, None].expand(-1, length, -1), cos, sin)
    last = rotary.turn(query, cos[-1:], sin[-1:]).unflatten(0, (len(keys), -1))
    weights = (torch.einsum("gqd,gtd->gqt", last, turned) * scale).softmax(dim=-1)
    return weights.cumsum(dim=-1).mean(dim=-1).flatten()
