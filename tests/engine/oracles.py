# SPDX-License-Identifier: Apache-2.0
"""What an engine must have kept, and what decoding must make of it, by Transformers in float32.

The model's attention hides, from each eviction on, what the engine gave up there. So its queries,
keys and values are those that the engine must have shown its scorer, and its log probabilities
those that the engine must have decoded. At each eviction the engine's choice is compared with the
best, and the walk goes on with the engine's, so a tie that went the other way is one difference.

Shape legend: T tokens of prompt and generation, t tokens that a KV head holds, H query heads, G KV
heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.engine.paper import HuggingFaceModel, window_importance
from tests.engine.support import Engine, Outcome, kept_at_evictions
from tests.methods.views import cos_sin, view_of
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.observation_window import ObservationWindowScorer
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy import Policy
from vllm_pyramid.step.rotary import Rotary

# Scores may differ by this share of the spread of a head's scores: another order of sums.
NEAR_SCORE = 5e-4
# A key whose attention is that near to the average counts for either side.
NEAR_AVERAGE = 1e-4
Held = Mapping[int, list[torch.Tensor]]


class EvictedModel(HuggingFaceModel):
    """A model from whose KV heads tokens are evicted at points; it records V and weights too."""

    values: list[torch.Tensor]
    weights: list[torch.Tensor]

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._held: Held = {}

    def decode(self, tokens: Sequence[int], held: Held) -> torch.Tensor:
        """Log probabilities `[T, vocabulary]` of the token after each one.

        Args:
            held: by the tokens computed at an eviction, a layer: `[G, computed]` bool.
        """
        self._held = dict(sorted(held.items()))
        return self.forward(tokens)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.values = [*(self.values if layer else []), value[0]]
        out = super().attend(layer, query, key, value, scale)
        group = query.shape[1] // key.shape[1]
        seen = self.visible(layer, key.shape[1], query.shape[2]).repeat_interleave(group, dim=0)
        logits = query[0] @ key[0].repeat_interleave(group, dim=0).transpose(1, 2) * scale
        weights = logits.double().masked_fill(~seen, -math.inf).softmax(dim=-1)
        self.weights = [*(self.weights if layer else []), weights]
        return out

    def visible(self, layer: int, kv_heads: int, total: int) -> torch.Tensor:
        visible = super().visible(layer, kv_heads, total)
        for point, layers in self._held.items():
            visible[:, point:, :point] = layers[layer][:, None, :total]
        return visible

    def given(self, layer: int, start: int, end: int) -> torch.Tensor:
        """H2O: what the queries up to `end` gave each key in all, `[G, end]`."""
        of_groups = self.weights[layer].unflatten(0, (len(self.keys[layer]), -1))
        return of_groups[:, :, start:end, :end].sum(dim=(1, 2))

    def seldom_low(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Minus how many queries gave each key less than average; by how much that may be off."""
        of_groups = self.weights[layer].unflatten(0, (len(self.keys[layer]), -1))
        rows = of_groups[:, :, start:end, :end]
        seen = self.visible(layer, len(rows), end)[:, None, start:end]
        share = rows * seen.sum(dim=-1, keepdim=True)  # 1 is the average
        low, near = (share < 1) & seen, ((share - 1).abs() < NEAR_AVERAGE) & seen
        return -low.sum(dim=(1, 2)).double(), near.sum(dim=(1, 2)).double()


def held_at_evictions(folder: Path, outcome: Outcome, kv_heads: int) -> Held:
    """What a trace says of each eviction, as `EvictedModel.decode` takes it."""
    found = {}
    for point, kept in kept_at_evictions(folder, outcome).items():
        rows: list[torch.Tensor] = []  # of every KV head of every layer in turn
        for positions in kept:
            held = torch.zeros(len(positions), point, dtype=torch.bool)
            rows += list(held.scatter_(1, positions.long(), True))
        found[point] = list(torch.stack(rows).unflatten(0, (-1, kv_heads)))
    return found


def check_log_probabilities(rows: torch.Tensor, outcome: Outcome, near: float = 5e-4) -> None:
    """Every generated token is the best, but for a near tie, and as likely as the model says."""
    for row, token, ours in zip(rows, outcome.token_ids, outcome.logprobs, strict=True):
        assert math.isclose(ours[token], float(row[token]), abs_tol=near)
        assert float(row.max() - row[token]) < near


def check_evictions(
    policy: Policy, engine: Engine, model: EvictedModel, outcome: Outcome, held: Held
) -> int:
    """Check that all of a request's evictions kept the best; return how many tokens they evicted.

    The window's scores are `paper.py`'s, and sums over queries are made here. Other scorers, whose
    formulas `tests/methods/test_scorers.py` tests, rank what Transformers computed.

    Args:
        model: that has decoded the outcome's tokens.
    """
    n = len(outcome.job.prompt)
    plan = policy.plan(n, engine.num_layers, engine.block_size)
    before: list[torch.Tensor] | None = None
    start = evicted = 0
    if isinstance(plan, RetentionPlan):
        numbers = range(1, plan.evictions_by(n + len(outcome.token_ids) - 1) + 1)
        assert list(held) == [plan.computed_at(number) for number in numbers]
    for point, layers in held.items():
        inside = point < n
        chooses = policy.inner_policy if inside and policy.inner_policy is not None else policy
        for layer, kept in enumerate(layers):
            there = torch.ones(len(kept), point, dtype=torch.bool)
            if before is not None:
                there[:, :start] = before[layer]
            assert (kept <= there).all(), "kept what was gone"
            lanes = range(layer * len(kept), (layer + 1) * len(kept))
            at = None
            if isinstance(plan, RetentionPlan):
                at = plan.after(plan.evictions_by(point))
                of_heads = at.held[lanes if engine.tables_per_layer > 1 else layer]
                assert (kept.sum(dim=1).numpy() == of_heads).all()
            if not (kept < there).any() or (before is not None and _sums_noise(chooses)):
                continue
            shown, whole = there.clone(), n if chooses.schedule.keeps_prompts else 0
            shown[:, :whole] = False
            assert kept[:, :whole].all(), "a prompt that stays was evicted from"
            scores, off = _scores(chooses, model, layer, shown, start, point)
            for head, (row, was, stays) in enumerate(zip(scores, shown, kept, strict=True)):
                first, last = chooses.sinks, chooses.window
                if at is not None:
                    lane = lanes[head] if engine.tables_per_layer > 1 else layer
                    first, last = max(first, at.front[lane]), max(last, at.recent[lane])
                first = max(first - whole, 0)
                off_of = off[head] if off is not None else None
                evicted += _check_best(row, stays[was], first, last, off_of)
        before, start = layers, point
    return evicted


def _sums_noise(policy: Policy) -> bool:
    """Whether the scorer adds up what only it knows (`keyformer`), so later sums are unknown."""
    scorer = policy.scorer
    return isinstance(scorer, AccumulatingScorer) and scorer.mass_kind is None


def _scores(
    policy: Policy, model: EvictedModel, layer: int, there: torch.Tensor, start: int, point: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores of what the KV heads hold, `[G, t]`, and by how much they may be off.

    Args:
        there: `[G, point]`, what they hold. start: tokens at the eviction before.
    """
    scorer, heads = policy.scorer, len(there)

    def of_held(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([row[was] for row, was in zip(rows, there, strict=True)])

    if isinstance(scorer, AccumulatingScorer) and scorer.mass_kind == "sum":
        return of_held(model.given(layer, 0, point)), None
    if isinstance(scorer, AccumulatingScorer) and scorer.mass_kind is not None:
        begin = max(start, point - (scorer.history or point))
        scores, off = model.seldom_low(layer, begin, point)
        return of_held(scores), of_held(off)
    if isinstance(scorer, ObservationWindowScorer) and scorer.pooling == "avg" and there.all():
        queries, keys = model.queries[layer][:, :point], model.keys[layer][:, :point]
        how = policy.window, scorer.kernel_size, scorer.gqa_reduce
        of_paper = window_importance(queries, keys, *how)
        return torch.nn.functional.pad(of_paper, (0, policy.window)), None
    gathers = isinstance(scorer, AccumulatingScorer)
    queries = model.queries[layer].transpose(0, 1)[:point]
    view = view_of(
        of_held(model.keys[layer][:, :point]),
        of_held(model.values[layer][:, :point]),
        queries if gathers else queries[-max(policy.window, 1) :],
        Rotary(cos_sin(model.keys[layer].shape[2], 4096)),
        window=policy.window,
        sinks=policy.sinks,
        layer=layer,
    )
    view = replace(view, last_position=point - 1)
    assert heads == view.num_kv_heads
    return (scorer.observe(view) if gathers else scorer.score(view)), None


def _check_best(
    scores: torch.Tensor, kept: torch.Tensor, first: int, last: int, off: torch.Tensor | None
) -> int:
    """Protected tokens are kept, and no other kept one is worse than one that is not; evicted."""
    tokens, stays = len(kept), int(kept.sum())
    if stays == tokens:
        return 0
    inside = torch.zeros(tokens, dtype=torch.bool)
    inside[first : tokens - last] = True
    if stays <= int((~inside).sum()):
        return tokens - stays  # less is kept than is certain: nothing to choose
    assert kept[~inside].all()
    chosen, given_up = scores[kept & inside], scores[~kept]
    slack = NEAR_SCORE * float(scores[inside].max() - scores[inside].min())
    if off is not None:
        slack += float(off[inside].max())
    assert float(chosen.min()) >= float(given_up.max()) - slack
    return tokens - stays
