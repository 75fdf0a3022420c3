# SPDX-License-Identifier: Apache-2.0
"""Compaction by attention matching: a bias for each kept key, and values by least squares.

After "Fast KV compaction via attention matching" (arXiv:2602.16284). Given the kept keys of a KV
head and reference queries with attention P over the whole prompt:

- bias: `b = log(w)`, with w in [exp(-3), exp(3)] least squares of `P[:, kept] w = 1`, so that the
  kept keys have the mass of all;
- values: least squares of `softmax(q . k + b) V' = P V`.

Reference queries are the prompt's, each with what it sees itself, or come from the prompt once
more behind itself, each with the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from model import Evicted, Kept, LayerCache, Model, Recorded, Step, attention
from pydantic import BaseModel, ConfigDict

ROWS = 2048  # reference queries of a KV head
_LOG_BOUND = 3.0  # of a bias, as the authors have it without their search for keys
_STEPS = 500  # of the bounded least squares


class Match(BaseModel):
    """What is fitted, and to which queries.

    Attributes:
        queries: the prompt's own, or of the prompt `repeated`. bias, values: whether each is
            fitted. chooses: keep the window and the keys with the largest mean square of their
            attention, not the policy's choice. ridge: of the values, of the mean of the diagonal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    queries: Literal["own", "repeated"] = "repeated"
    bias: bool = True
    values: bool = True
    chooses: bool = False
    ridge: float = 1e-2


@dataclass
class References:
    """Queries of a layer, and the attention that they have in the whole cache.

    Attributes:
        queries: `[G, R, D]`, R of all query heads of a KV head, the scale in them.
        last: `[R]`, the last place that each sees. normaliser: `[G, R]` log sums of its weights.
        outputs: `[G, R, D]`. power: `[G, T]`, the mean square of the attention to a place.
    """

    queries: torch.Tensor
    last: torch.Tensor
    normaliser: torch.Tensor
    outputs: torch.Tensor
    power: torch.Tensor

    @classmethod
    def of(
        cls, queries: torch.Tensor, cache: LayerCache, scale: float, last: torch.Tensor
    ) -> References:
        """Take some of `[n, H, D]` queries, evenly; `last` is `[n]`."""
        heads, tokens, _ = cache.keys.shape
        group = queries.shape[1] // heads
        some = torch.linspace(0, len(queries) - 1, min(ROWS // group, len(queries))).long()
        split = queries[some].unflatten(1, (heads, group)).transpose(0, 1) * scale
        rows, last = split.flatten(1, 2), last[some].repeat_interleave(group)
        found = []
        for own, keys, values in zip(rows, cache.keys, cache.values, strict=True):
            logits = (own @ keys.T).masked_fill(torch.arange(tokens) > last[:, None], -torch.inf)
            seen = logits.softmax(dim=-1)
            found.append((logits.logsumexp(dim=-1), seen @ values, seen.square().mean(dim=0)))
        return cls(rows, last, *map(torch.stack, zip(*found, strict=True)))

    def mass(self, head: int, keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the attention `[R, L]` to kept places of a KV head's keys `[T, D]`."""
        weights = (self.queries[head] @ keys[kept].T - self.normaliser[head][:, None]).exp()
        return weights.masked_fill_(kept > self.last[:, None], 0.0)


class _Asking:
    """A way that attends to everything, and keeps its queries as references."""

    def __init__(self) -> None:
        self.found: list[References] = []

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        last = torch.full((step.q.shape[1],), cache.keys.shape[1] - 1)
        self.found.append(References.of(step.q.transpose(0, 1), cache, step.scale, last))
        return step.over(cache.keys, cache.values)


def references(model: Model, ids: list[int], recorded: Recorded, match: Match) -> list[References]:
    """Return the reference queries of all layers, of a prompt and what was recorded of it."""
    if match.queries == "own":
        last = torch.arange(len(ids))
        return [References.of(each.queries, each, model.scale, last) for each in recorded.layers]
    asking = _Asking()
    model.continued(recorded, ids, [asking])
    return asking.found


class Matched(Evicted):
    """A way that evicts, and changes the weights and the values of what is kept."""

    def __init__(
        self,
        kept: Kept,
        match: Match,
        found: list[References],
        layers: list[LayerCache],
        window: int,
    ) -> None:
        super().__init__([list(places) for places in kept])
        self.bias: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for places, reference, cache in zip(self.kept, found, layers, strict=True):
            each = []
            for head, own in enumerate(places):
                if match.chooses:
                    power = reference.power[head].clone()
                    power[-window:] = torch.inf
                    own = places[head] = power.topk(len(own)).indices.sort().values
                mass = reference.mass(head, cache.keys[head], own)
                wanted, values = reference.outputs[head], cache.values[head, own]
                each.append(fitted(mass, wanted, values, window, match))
            self.bias.append(torch.stack([bias for bias, _ in each]))
            self.values.append(torch.stack([values for _, values in each]))

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        rows = torch.stack(self.kept[step.layer])
        heads = torch.arange(len(rows))[:, None]
        n, group = step.q.shape[1], len(step.q) // len(rows)
        later = torch.zeros(len(rows), n, n).masked_fill_(
            torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf
        )
        old = self.bias[step.layer][:, None].expand(-1, n, -1)
        mask = torch.cat([old, later], dim=-1).repeat_interleave(group, dim=0)
        keys = torch.cat([cache.keys[heads, rows], step.k], dim=1)
        values = torch.cat([self.values[step.layer], step.v], dim=1)
        return attention(step.q[None], keys[None], values[None], step.scale, mask[None])[0]


def fitted(
    mass: torch.Tensor, wanted: torch.Tensor, values: torch.Tensor, window: int, match: Match
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias `[L]` and the values `[L, D]` of kept tokens of a KV head.

    Args:
        mass: `[R, L]` attention of the reference queries to them, of the whole cache's. wanted:
            `[R, D]`, the outputs over the whole cache. values: `[L, D]`.
        window: of the last kept tokens stay as they are: few reference queries are near them.
    """
    mass = mass.double()
    old = mass.shape[1] - window
    weights = torch.ones(len(values), dtype=torch.float64)
    if match.bias:
        free = mass[:, :old]
        missing = 1 - mass[:, old:].sum(dim=-1)
        weights[:old] = bounded_least_squares(free.T @ free, free.T @ missing)
    if match.values:
        part = mass * weights
        part /= part.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        # Least squares of the change, so that a value that no reference query sees stays as it is.
        free = part[:, :old]
        gram = free.T @ free
        gram.diagonal().add_(match.ridge * gram.diagonal().mean())
        change = torch.linalg.solve(gram, free.T @ (wanted - part @ values.double()))
        values = torch.cat([values[:old] + change.to(values.dtype), values[old:]])
    return weights.log().to(values.dtype), values


def bounded_least_squares(gram: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Return w in [exp(-3), exp(3)] with the least `w gram w - 2 moment w`, by FISTA from 1."""
    low, high = torch.tensor([-_LOG_BOUND, _LOG_BOUND], dtype=gram.dtype).exp()
    rate = 1 / torch.linalg.matrix_norm(gram, 2)
    found = ahead = torch.ones_like(moment)
    momentum = 1.0
    for _ in range(_STEPS):
        new = (ahead - rate * (gram @ ahead - moment)).clamp(low, high)
        grown = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / grown * (new - found)
        found, momentum = new, grown
    return found
