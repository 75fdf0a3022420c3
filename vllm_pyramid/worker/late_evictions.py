# SPDX-License-Identifier: Apache-2.0
"""Evictions that the scheduler orders when it lacks blocks (`PressureSchedule`).

    a prompt's end   score, then select once for each level: nothing moves      take_scores
                     a byte a token and KV head: how many levels it survives
                     the share of the scores that each level loses -> scheduler  take_losses
    an order         move the survivors of the level in all layers, before the   carry_out
                     step whose skips leave the others out

What a level keeps is what an eviction to its budget keeps at the prompt's end, in every KV head.
With `AnswerLevels` further points follow, which are as a prompt's end.

All layers are taken together (`attention/step_end.py`), unless their caches differ.

Shape legend: S rows of requests and layers, G KV heads of this rank, K layers, n tokens that they
hold of a request, at most.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.plan import (
    EvictionPoint,
    IntArray,
    LateEviction,
    LevelPlan,
    Order,
    PlanMismatchError,
    RetentionPlan,
)
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.eviction_rows import padded_width
from vllm_pyramid.step.hooks import EvictionHooks, StepHooks, WorkerContext
from vllm_pyramid.step.step import WorkerRequest
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.upload import upload


@dataclass(frozen=True)
class _Marks:
    """The levels of a request's tokens in K layers whose caches are one tensor.

    Attributes:
        layers, lens: `[K]` the layers, and the tokens that each holds up to the point.
        marks: how many levels each of these tokens survives: `[K, G, n]` uint8, 0 behind `lens`.
        caches: the layer whose caches are those of all.
    """

    layers: IntArray
    lens: IntArray
    marks: torch.Tensor
    caches: int

    def only(self, rows: npt.NDArray[np.bool_]) -> _Marks:
        """Return some of the layers."""
        if rows.all():
            return self
        chosen = upload(np.flatnonzero(rows), self.marks.device)
        marks = self.marks.index_select(0, chosen)
        return replace(self, layers=self.layers[rows], lens=self.lens[rows], marks=marks)


@dataclass
class _Levels:
    """The levels of a request.

    Attributes:
        point: the tokens up to which it has levels: those of the prompt, if no point followed.
        count: of levels.
        skip: `[num_layers]`, tokens that each layer has given up.
        marks: of its layers.
        lost: `[levels]` float32, the share of the scores that each level loses, summed over layers;
            None once it has been reported.
    """

    point: int
    count: int
    skip: IntArray
    marks: list[_Marks] = field(default_factory=list)
    lost: torch.Tensor | None = None


class LateEvictions(StepHooks, EvictionHooks):
    """Levels the prompts of one worker, and carries out orders.

    Attributes:
        without: the requests that get no levels in the step that is about to begin.
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
        self.without: Container[str] = ()

    # The end of a prompt --------------------------------------------------------------------------

    def wants_scores(self, evictions: StepEvictions) -> StepEvictions | None:
        """Return the requests whose prompts end in this step, as they evict to the first level."""
        if evictions is not self._of:
            self._of = evictions
            requests = self._step().requests
            levels = [self._levels_of(requests[row]) for row in evictions.rows.tolist()]
            self._at_levels = self._begin(evictions, levels)
        return self._at_levels[0] if self._at_levels else None

    def take_scores(self, batch: EvictionBatch, scores: torch.Tensor) -> None:
        """Level the tokens of prompts that end in this step, in some layers."""
        self._level(self._at_levels, batch, scores)

    def _levels_of(self, request: WorkerRequest) -> Sequence[EvictionPoint]:
        """Return the levels that a request gets at its prompt's end."""
        if not isinstance(request.plan, LevelPlan) or request.request_id in self.without:
            return ()
        return request.plan.levels

    def _begin(
        self, evictions: StepEvictions, levels: Sequence[Sequence[EvictionPoint]]
    ) -> list[StepEvictions]:
        """Forget what requests had of levels, and return what they would evict at each new one.

        A request without new `levels` keeps those that it has.
        """
        self._failed = evictions.failures.of
        for index, (name, own) in enumerate(zip(evictions.request_ids, levels, strict=True)):
            if own:
                skip = evictions.previous_skips[:, index].copy()
                self._requests[name] = _Levels(own[0].computed, len(own), skip)
                self._unreported.append(name)
        return [
            evictions.with_points(
                {i: own[min(level, len(own) - 1)] for i, own in enumerate(levels) if own}
            )
            for level in range(max(map(len, levels), default=0))
        ]

    def _level(
        self, at_levels: Sequence[StepEvictions], batch: EvictionBatch, scores: torch.Tensor
    ) -> None:
        """Count the levels that each token survives, and what each level loses of the scores."""
        call, longest = batch.call, batch.longest
        self._caches[call.layer] = call.ops, call.moved
        # One column more, for places that `select` leaves empty.
        shape = len(batch.shortened), scores.shape[1], longest + 1
        marks = torch.zeros(shape, dtype=torch.uint8, device=scores.device)
        for evictions in at_levels:
            kept = batch.evicting_to(evictions).select(scores).long()
            kept = kept.masked_fill_(kept < 0, longest)
            marks.scatter_add_(2, kept, torch.ones_like(kept, dtype=torch.uint8))
        marks = marks[:, :, :longest]
        lost = _lost(batch, scores, marks, len(at_levels))
        names = batch.evictions.request_ids
        for index in np.unique(batch.shortened).tolist():
            levels, rows = self._requests[names[index]], batch.shortened == index
            lens, chosen = batch.host_lens[rows], upload(np.flatnonzero(rows), scores.device)
            own = marks[:, :, : int(lens.max())].index_select(0, chosen)
            levels.marks.append(_Marks(batch.layers[rows], lens, own, call.layer))
            sums = lost.index_select(0, chosen).sum(dim=0)
            levels.lost = sums if levels.lost is None else levels.lost + sums

    def take_losses(self) -> dict[str, tuple[int, list[float]]]:
        """Return who has got levels since the last call: up to which token, and what these lose.

        The mean over this worker's layers and KV heads.
        """
        found, sums = {}, []
        for name in self._unreported:
            levels = self._requests.get(name)
            if levels is not None and levels.lost is not None:
                layers = sum(len(of_layers.layers) for of_layers in levels.marks)
                sums.append(levels.lost / layers)
                found[name] = levels
        shares = iter(torch.cat(sums).cpu().split([len(one) for one in sums]) if sums else ())
        losses = {}
        for name, levels in found.items():
            losses[name] = levels.point, next(shares)[: levels.count].tolist()
            levels.lost = None
        self._of, self._at_levels, self._unreported = None, [], []
        return losses

    # Orders ---------------------------------------------------------------------------------------

    def carry_out(
        self,
        orders: Mapping[str, LateEviction],
        follow: Callable[[str, Sequence[Order]], RetentionPlan | None],
    ) -> None:
        """Evict requests to the levels that were ordered, in all layers of this worker.

        A request whose tokens could not be scored ends with an error; its skips change all the
        same, as those of the other ranks do. For `follow` see `EvictionTracker.order`.
        """
        for request_id, order in orders.items():
            if (plan := follow(request_id, order.orders)) is None:
                continue
            (at, level), point = order.orders[-1], plan.end
            if request_id in self._failed:
                continue
            levels = self._requests.get(request_id)
            if levels is None or levels.point != at:
                has = "no levels" if levels is None else f"levels up to token {levels.point}"
                raise PlanMismatchError(
                    f"request {request_id} is ordered to evict up to token {at} and has {has}: "
                    "scheduler and worker disagree about the KV policy; report this"
                )
            left = []
            for marks in levels.marks:
                moves = point.skip[marks.layers] > levels.skip[marks.layers]
                if not moves.all():
                    left.append(marks.only(~moves))
                if moves.any():
                    own = marks.only(moves)
                    left.append(self._compact(own, levels.skip, point, level, order.blocks))
            levels.marks, levels.skip = left, np.maximum(point.skip, levels.skip)

    def _compact(
        self,
        of_layers: _Marks,
        skip: IntArray,
        point: EvictionPoint,
        level: int,
        blocks: Sequence[Sequence[int]],
    ) -> _Marks:
        """Move the survivors of a level to the end of the tokens that have levels, in some layers.

        `skip` is what each layer has given up before; `blocks` are what it holds.
        """
        layers, marks = of_layers.layers, of_layers.marks
        before, keeps = skip[layers], point.held[layers].astype(np.int32)
        starts = before // point.block_size * point.block_size  # of the tables' tokens
        most, lens = int(keeps.max()), point.computed - starts
        table = np.zeros((len(layers), padded_width(max(len(blocks[i]) for i in layers))), np.int32)
        for row, layer in zip(table, layers.tolist(), strict=True):
            row[: len(blocks[layer])] = blocks[layer]
        device = marks.device
        first, counts, held = upload(
            np.stack([before - starts, lens, keeps]).astype(np.int32), device
        )
        survives = marks > level
        # The place of each survivor among the survivors; the others go to a column of their own.
        order = survives.cumsum(2, dtype=torch.int64).sub_(1).masked_fill_(~survives, most)
        places = torch.arange(marks.shape[2], dtype=torch.int32, device=device)
        kept = torch.zeros(*marks.shape[:2], most + 1, dtype=torch.int32, device=device)
        kept = kept.scatter_(2, order, places.expand_as(marks))[:, :, :most]
        ops, moved = self._caches[of_layers.caches]
        moving = kept + first[:, None, None]
        ops.compact(*moved, upload(table, device), moving, counts, held, max_keep=most)
        marks = marks.gather(2, kept.long())
        if (keeps < most).any():
            marks.masked_fill_(places[:most] >= held[:, None, None], 0)
        return replace(of_layers, lens=keeps, marks=marks)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def release(self) -> None:
        """Let go of the caches, which vLLM is about to allocate anew."""
        self._caches.clear()


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
