# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt once more, in a forward pass that shares no code with the package.

The tokens of a whole generation go through Hugging Face Transformers, layer by layer, in stretches
between the points at which something is evicted: the queries of a stretch see what their KV head
still holds and each other. At each point the best are chosen by formulas written here; what the
engine kept is compared with that, and the walk goes on with the engine's choice, so that a tie that
went the other way is one difference and not the end of the comparison.

Shape legend: T tokens of prompt and generation, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.engine.paper import HuggingFaceModel

# Scores are sums of float32 products in another order.
NEAR_TIE = 5e-5


@dataclass(frozen=True)
class Scoring:
    """How keys are scored at a point, and which of the last tokens stay in any case.

    Attributes:
        name: `window` (SnapKV), `keydiff`, `sum` (H2O). sinks: first tokens that stay.
        recent: how many of the most recent tokens stay in any case (H2O), window included.
    """

    name: str
    window: int
    sinks: int = 0
    kernel_size: int = 5
    recent: int = 0


@dataclass
class Comparison:
    """What the walk found."""

    points: int = 0
    kept: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)


class ChunkedModel(HuggingFaceModel):
    """Transformers' model whose attention evicts at points.

    Args:
        inner: how points inside the prompt score. last: how its end does.
    """

    def __init__(self, path: str, inner: Scoring, last: Scoring) -> None:
        super().__init__(path)
        self.inner, self.last = inner, last
        self.found = Comparison()
        self._kept_at: dict[int, list[torch.Tensor]] = {}
        self._end = 0

    def walk(
        self, tokens: Sequence[int], prompt_len: int, kept: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        """Log probabilities `[T, vocabulary]` of the token after each one.

        Args:
            kept: by the tokens computed at an eviction, a layer: `[G, held]` positions that the
                engine kept.
        """
        self._kept_at, self._end = kept, prompt_len
        return self.forward(tokens)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See the base: stretch by stretch."""
        heads, total = query.shape[1:3]
        kv_heads, group = key.shape[1], heads // key.shape[1]
        held = torch.zeros(kv_heads, total, dtype=torch.bool)
        given = torch.zeros(kv_heads, total, dtype=torch.float64)
        out = torch.empty(total, heads, query.shape[3])
        points = [point for point in sorted(self._kept_at) if point <= total]
        for start, end in itertools.pairwise(
            [0, *points, *([total] if total not in points else [])]
        ):
            for g in range(kv_heads):
                where = torch.cat([held[g, :start].nonzero()[:, 0], torch.arange(start, end)])
                q = query[0, g * group : (g + 1) * group, start:end].double()
                logits = q @ key[0, g, where].double().T * scale
                later = where[None, :] > torch.arange(start, end)[:, None]
                weights = logits.masked_fill(later, -math.inf).softmax(dim=-1)
                out[start:end, g * group : (g + 1) * group] = (
                    (weights @ value[0, g, where].double()).transpose(0, 1).float()
                )
                given[g, where] += weights.sum(dim=(0, 1))
                held[g, start:end] = True
                if end in points:
                    how = self.inner if end < self._end else self.last
                    score = self._score(how, weights, key[0, g, where].double(), given[g, where])
                    self._follow(layer, g, end, how, where, score)
                    held[g] = False
                    held[g, self._kept_at[end][layer][g].long()] = True
        return out[None]

    def _score(
        self, how: Scoring, weights: torch.Tensor, keys: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """Scores of the tokens that a KV head holds, `[t]`.

        Args:
            weights: `[group, queries, t]`. keys: `[t, D]`. given: `[t]` sums over all queries.
        """
        if how.name == "sum":
            return given
        if how.name == "keydiff":
            unit = keys / keys.norm(dim=-1, keepdim=True)
            anchor = unit.mean(dim=0)
            return -(unit @ (anchor / anchor.norm()))
        mass = weights[:, -how.window :].sum(dim=1).mean(dim=0)[: -how.window]
        half = how.kernel_size // 2
        padded = torch.nn.functional.pad(mass, (half, half))
        pooled = padded.unfold(0, how.kernel_size, 1).mean(dim=-1)
        return torch.nn.functional.pad(pooled, (0, how.window))

    def _follow(
        self, layer: int, g: int, end: int, how: Scoring, where: torch.Tensor, score: torch.Tensor
    ) -> None:
        """Compare the engine's choice at a point with ours."""
        ours = set(self._kept_at[end][layer][g].tolist())
        there = where.tolist()
        self.found.points += 1
        self.found.kept += len(ours)
        if not ours <= set(there):
            self.found.problems.append(f"layer {layer}, {end}: kept what was gone")
        recent = max(how.window, how.recent)
        certain = {*there[: how.sinks], *(there[-recent:] if recent else [])}
        if len(certain) > len(ours):
            return  # less is kept than is certain: nothing to choose
        at = dict(zip(there, score.tolist(), strict=True))
        others = sorted((p for p in there if p not in certain), key=lambda p: (-at[p], p))
        right = certain | set(others[: len(ours) - len(certain)])
        self.found.different += len(right - ours)
        for a, b in itertools.product(right - ours, ours - right):
            if abs(at[a] - at[b]) > NEAR_TIE * max(abs(at[a]), 1e-3):
                self.found.problems.append(
                    f"layer {layer}, head {g}, {end} tokens: keeps {b} instead of {a}, scores "
                    f"{at[b]} and {at[a]}"
                )
