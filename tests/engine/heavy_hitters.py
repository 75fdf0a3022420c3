# SPDX-License-Identifier: Apache-2.0
"""H2O and Scissorhands once more, written from their papers and sharing no code with the package.

The tokens of a whole generation go through Hugging Face Transformers in one forward pass. In every
layer the queries are walked through in order: each sees what its KV head still holds, what it gives
is added up, and at each eviction the best are kept. What is kept is then compared with what the
engine kept, and the walk goes on with the engine's choice, so that a tie that went the other way is
one difference and not the end of the comparison.

Shape legend: T tokens of prompt and generation, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine.paper import HuggingFaceModel

# A sum of probabilities may be off by this share of itself, a probability by this share of 1 / t.
NEAR_TIE = 2e-5
NEAR_AVERAGE = 1e-4


@dataclass(frozen=True)
class Method:
    """A policy's numbers: what is added up, how many tokens stay, how many of them the latest.

    Attributes:
        history: last queries before an eviction that count (Scissorhands); None for all (H2O).
    """

    budget: int
    interval: int
    recent: int
    history: int | None = None

    def low_scores(self) -> bool:
        return self.history is not None


@dataclass
class Comparison:
    """What the walk found."""

    evictions: int = 0
    kept: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)


class WalkedModel(HuggingFaceModel):
    """Transformers' model whose attention evicts as it goes.

    Args:
        path: of the model. method: the policy's numbers.
    """

    def __init__(self, path: str, method: Method) -> None:
        super().__init__(path)
        self.method = method
        self.found = Comparison()
        self._points: list[int] = []
        self._choices: list[list[torch.Tensor]] = []

    def walk(
        self, tokens: Sequence[int], points: list[int], kept: list[list[torch.Tensor]]
    ) -> torch.Tensor:
        """Log probabilities `[T, vocabulary]` of the token after each one.

        Args:
            points: tokens computed at each eviction. kept: of each, a layer: `[G, held]` positions
                that the engine kept.
        """
        self._points, self._choices = points, kept
        return self.forward(tokens)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        heads, total = query.shape[1:3]
        kv_heads, group = key.shape[1], heads // key.shape[1]
        held = torch.ones(kv_heads, total, dtype=torch.bool)
        score = torch.zeros(kv_heads, total, dtype=torch.float64)
        unsure = torch.zeros_like(score)  # by how much the score may be off
        out = torch.empty(total, heads, query.shape[3])
        ends = [point for point in self._points if point < total]
        upcoming = [*ends, *self._points[len(ends) : len(ends) + 1]] or [total]
        for position in range(total):
            if position in ends:
                index = ends.index(position)
                self._evict(layer, position, held, score, unsure, self._choices[index][layer])
                if self.method.low_scores():
                    score.zero_()
                    unsure.zero_()
            point = next((p for p in upcoming if p > position), None)
            counts = point is not None and (
                self.method.history is None or position >= point - self.method.history
            )
            for g in range(kv_heads):
                seen = held[g].clone()
                seen[position + 1 :] = False
                where = seen.nonzero()[:, 0]
                q = query[0, g * group : (g + 1) * group, position].double()
                weights = (q @ key[0, g, where].double().T * scale).softmax(dim=-1)
                out[position, g * group : (g + 1) * group] = (
                    weights @ value[0, g, where].double()
                ).float()
                if not counts:
                    continue
                if self.method.low_scores():
                    share = weights * len(where)  # 1 is the average
                    score[g, where] -= (share < 1).sum(dim=0).double()
                    unsure[g, where] += ((share - 1).abs() < NEAR_AVERAGE).sum(dim=0).double()
                else:
                    score[g, where] += weights.sum(dim=0)
                    unsure[g, where] = NEAR_TIE * score[g, where]
        if total in self._points:
            index = self._points.index(total)
            self._evict(layer, total, held, score, unsure, self._choices[index][layer])
        return out[None]

    def _evict(
        self,
        layer: int,
        end: int,
        held: torch.Tensor,
        score: torch.Tensor,
        unsure: torch.Tensor,
        choice: torch.Tensor,
    ) -> None:
        """Compare the engine's choice with ours, and follow it. `held` is `[G, T]`, changed."""
        self.found.evictions += 1
        for g in range(held.shape[0]):
            ours = set(choice[g].tolist())
            there = held[g, :end].nonzero()[:, 0].tolist()
            if not ours <= set(there):
                self.found.problems.append(f"layer {layer}, {end}: kept what was gone")
            latest = there[-min(self.method.recent, len(ours)) :] if self.method.recent else []
            others = [position for position in there if position not in set(latest)]
            # The best scores; of equal ones the earlier position.
            others.sort(key=lambda position: (-float(score[g, position]), position))
            right = set(others[: len(ours) - len(latest)]) | set(latest)
            self.found.kept += len(ours)
            self.found.different += len(right - ours)
            for a, b in itertools.product(right - ours, ours - right):
                gap = abs(float(score[g, a] - score[g, b]))
                if gap > float(unsure[g, a] + unsure[g, b]):
                    self.found.problems.append(
                        f"layer {layer}, head {g}, {end} tokens: keeps {b} instead of {a}, scores "
                        f"{float(score[g, b])} and {float(score[g, a])}"
                    )
            held[g, :end] = False
            held[g, choice[g].long()] = True


def held_tokens(method: Method, computed: int, block: int, fill_blocks: bool) -> int:
    """How many tokens a layer of equal budgets holds after an eviction."""
    given = max(0, computed - method.budget)
    return computed - (given // block * block if fill_blocks else given)


def check_log_probabilities(rows: torch.Tensor, outcome: Any) -> None:
    """Every generated token is what attention over exactly the kept tokens gives."""
    assert rows.argmax(dim=-1).tolist() == outcome.token_ids
    for row, token, ours in zip(rows, outcome.token_ids, outcome.logprobs, strict=True):
        assert math.isclose(ours[token], float(row[token]), abs_tol=5e-4)
