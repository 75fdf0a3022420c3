# SPDX-License-Identifier: Apache-2.0
"""Evictions that the scheduler orders when it lacks blocks (`PressureSchedule`).

    a prompt's end   score, then select once for each level: nothing moves      after_eviction
                     a byte a token and KV head: how many levels it survives
                     the share of the scores that each level loses -> scheduler  take_losses
    an order         move the survivors of the level in all layers, before the   carry_out
                     step whose skips leave the others out

What a level keeps is what an eviction to its budget keeps at the prompt's end, in every KV head.
With `AnswerLevels` further points follow, which are as a prompt's end.

Shape legend: S requests whose prompts end in the step, G KV heads of this rank, T tokens of the
longest of these prompts, n tokens that a request holds of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.plan import (
    EvictionPoint,
    LateEviction,
    LevelPlan,
    Order,
    Plan,
    PlanMismatchError,
    RetentionPlan,
)
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import EvictionHooks, StepHooks, WorkerContext
from vllm_pyramid.step.score_check import ranked
from vllm_pyramid.step.step_evictions import StepEvictions


@dataclass
class _Levels:
    """The levels of a request.

    Attributes:
        point: the tokens up to which it has levels: those of the prompt, if no point followed.
        count: of levels.
        marks: by layer, how many levels each token survives that the layer holds up to the point:
            `[G, n]` uint8.
        lost: `[levels]` float32, the share of the scores that each level loses, summed over layers;
            None once it has been reported.
        skip: by layer, tokens that the layer has given up.
    """

    point: int
    count: int
    marks: dict[int, torch.Tensor] = field(default_factory=dict)
    lost: torch.Tensor | None = None
    skip: dict[int, int] = field(default_factory=dict)


class LateEvictions(StepHooks, EvictionHooks):
    """Levels the prompts of one worker, and carries out orders.

    Args:
        policy: the served policy. context: of the worker.
    """

    name = "pressure"

    def __init__(self, policy: Policy, context: WorkerContext) -> None:
        self._policy, self._step = policy, context.step
        self._requests: dict[str, _Levels] = {}
        self._caches: dict[int, tuple[Ops, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._of: StepEvictions | None = None
        self._at_levels: list[StepEvictions] = []
        self._unreported: list[str] = []
        self._failed: Container[str] = ()  # as far as the host knows

    # The end of a prompt --------------------------------------------------------------------------

    def after_eviction(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        """Level the tokens of the prompts that end in this step, in one layer."""
        self._level_all(inputs, self._evictions(evictions))

    def _level_all(self, inputs: AttentionInputs, at_levels: list[StepEvictions]) -> None:
        """Level the tokens of requests in one layer, which are evicted to each level in turn."""
        if not at_levels:
            return
        first = at_levels[0]
        for piece in first.pieces(inputs, np.arange(len(first.request_ids))):
            batch = first.batch(inputs, self._policy, piece)
            found = ranked(batch, self._policy.scorer.scores(batch))
            if found is not None:
                self._level(inputs, at_levels, *found)
        self._caches[inputs.layer] = inputs.ops, inputs.moved

    def _evictions(self, evictions: StepEvictions) -> list[StepEvictions]:
        """Return what the step would evict at each level; made once for all layers."""
        if evictions is not self._of:
            self._of = evictions
            requests = self._step().requests
            plans = [requests[row].plan for row in evictions.rows.tolist()]
            self._at_levels = self._begin(evictions, [_levels(plan) for plan in plans])
        return self._at_levels

    def _begin(
        self, evictions: StepEvictions, levels: Sequence[Sequence[EvictionPoint]]
    ) -> list[StepEvictions]:
        """Forget what requests had of levels, and return what they would evict at each new one.

        Args:
            levels: of each request of the step's; one without levels keeps those that it has.
        """
        self._failed = evictions.failures.of
        for index, (name, own) in enumerate(zip(evictions.request_ids, levels, strict=True)):
            if own:
                skip = dict(enumerate(evictions.previous_skips[:, index].tolist()))
                self._requests[name] = _Levels(own[0].computed, len(own), skip=skip)
                self._unreported.append(name)
        return [
            evictions.with_points(
                {i: own[min(level, len(own) - 1)] for i, own in enumerate(levels) if own}
            )
            for level in range(max(map(len, levels), default=0))
        ]

    def _level(
        self,
        inputs: AttentionInputs,
        at_levels: list[StepEvictions],
        batch: EvictionBatch,
        scores: torch.Tensor,
    ) -> None:
        """Count the levels that each token survives, and what each level loses of the scores."""
        shape = len(batch.shortened), inputs.key_cache.shape[1], batch.longest
        # One column more, for places that `select` leaves empty.
        marks = torch.zeros(*shape[:2], shape[2] + 1, dtype=torch.uint8, device=scores.device)
        for evictions in at_levels:
            at_level = evictions.batch(inputs, self._policy, batch.shortened)
            kept = at_level.select(scores).long()
            kept = kept.masked_fill_(kept < 0, shape[2])
            marks.scatter_add_(2, kept, torch.ones_like(kept, dtype=torch.uint8))
        marks = marks[:, :, : shape[2]]
        lost = _lost(batch, scores, marks, len(at_levels))
        for row, name in enumerate(batch.request_ids):
            levels, tokens = self._requests[name], int(batch.host_lens[row])
            levels.marks[inputs.layer] = marks[row, :, :tokens].clone()
            levels.lost = lost[row] if levels.lost is None else levels.lost + lost[row]

    def take_losses(self) -> dict[str, tuple[int, list[float]]]:
        """Return who has got levels since the last call: up to which token, and what these lose.

        The mean over this worker's layers and KV heads.
        """
        found = {}
        for name in self._unreported:
            levels = self._requests.get(name)
            if levels is not None and levels.lost is not None:
                shares = (levels.lost / len(levels.marks)).tolist()
                found[name] = levels.point, shares[: levels.count]
                levels.lost = None
        self._of, self._at_levels, self._unreported = None, [], []
        return found

    # Orders ---------------------------------------------------------------------------------------

    def carry_out(
        self,
        orders: Mapping[str, LateEviction],
        follow: Callable[[str, Sequence[Order]], RetentionPlan | None],
    ) -> None:
        """Evict requests to the levels that were ordered, in all layers of this worker.

        A request whose tokens could not be scored ends with an error; its skips change all the
        same, as those of the other ranks do.

        Args:
            follow: lets a request follow an order, see `EvictionTracker.order`.
        """
        for request_id, order in orders.items():
            if (plan := follow(request_id, order.orders)) is None:
                continue
            (at, level), point = order.orders[-1], plan.end
            levels = self._requests.get(request_id)
            if levels is None or request_id in self._failed:
                levels = _Levels(at, 0)
            if levels.point != at:
                raise PlanMismatchError(
                    f"request {request_id} is ordered to evict up to token {at} and has levels up "
                    f"to token {levels.point}: scheduler and worker disagree about the KV policy; "
                    "report this"
                )
            for layer, marks in levels.marks.items():
                if point.skip[layer] > levels.skip.get(layer, 0):
                    table = torch.tensor([order.blocks[layer]], dtype=torch.int32)
                    table = table.to(marks.device)
                    self._compact(layer, levels, marks, point, level, table)

    def _compact(
        self,
        layer: int,
        levels: _Levels,
        marks: torch.Tensor,
        point: EvictionPoint,
        level: int,
        table: torch.Tensor,
    ) -> None:
        """Move the survivors of a level in one layer to the end of the tokens that have levels."""
        before = levels.skip.get(layer, 0)
        first = before // point.block_size * point.block_size  # of the table's tokens
        keep, device = int(point.held[layer]), marks.device
        survives = marks > level
        # The place of each survivor among the survivors; the others go to a column of their own.
        order = survives.cumsum(1, dtype=torch.int64).sub_(1)
        order.masked_fill_(~survives, keep)
        places = torch.arange(marks.shape[1], dtype=torch.int32, device=device)
        kept = torch.zeros(len(marks), keep + 1, dtype=torch.int32, device=device)
        kept.scatter_(1, order, places.expand_as(marks))
        kept = kept[:, :keep]
        ops, moved = self._caches[layer]
        numbers = torch.tensor([point.computed - first, keep], dtype=torch.int32, device=device)
        ops.compact(
            *moved,
            table,
            (kept + (before - first))[None].contiguous(),
            numbers[:1],
            numbers[1:],
            max_keep=keep,
        )
        levels.marks[layer] = marks.gather(1, kept.long())
        levels.skip[layer] = int(point.skip[layer])

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def release(self) -> None:
        """Let go of the caches, which vLLM is about to allocate anew."""
        self._caches.clear()


def _levels(plan: Plan) -> tuple[EvictionPoint, ...]:
    """Return the levels of a plan; none where evictions wait for no orders."""
    return plan.levels if isinstance(plan, LevelPlan) else ()


def _lost(
    batch: EvictionBatch, scores: torch.Tensor, marks: torch.Tensor, levels: int
) -> torch.Tensor:
    """Return the share of the scores that each level loses, `[S, levels]`, a mean over KV heads.

    Scores count from the lowest of their head on, without the first `sinks` and last `window`
    tokens, which stay in any case, and without those of -inf, which are worth nothing.
    """
    columns = torch.arange(min(scores.shape[2], marks.shape[2]), device=scores.device)
    counts = (columns >= batch.policy.sinks) & (
        columns < (batch.lens - batch.policy.window)[:, None]
    )
    scores, marks = scores[:, :, : len(columns)], marks[:, :, : len(columns)]
    counts = counts[:, None] & (scores > -torch.inf)
    lowest = scores.masked_fill(~counts, torch.inf).amin(dim=2, keepdim=True)
    scores = (scores - lowest).masked_fill_(~counts, 0.0)
    total = scores.sum(dim=2).clamp_(min=1e-30)
    lost = [scores.masked_fill(marks > level, 0.0).sum(dim=2) / total for level in range(levels)]
    return torch.stack(lost, dim=2).mean(dim=1)
