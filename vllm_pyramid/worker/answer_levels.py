# SPDX-License-Identifier: Apache-2.0
"""Levels of generated tokens, for orders that evict answers (`PressureSchedule.answers`).

    generated tokens   0 ............ a - q .......... a ............ 2a - q ......... 2a
    a step             as any         keeps queries    levels anew    as any           ...

At a point all tokens of a request get levels, as at a prompt's end: they are scored by their last
`q` queries. A decode step has one query, so layers keep those of the steps before a point
(`RecentQueries`). A request that finds no slot keeps the levels that it has. Layers are scored
together at the step's end where prompts are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.attention.evict import evict_layer
from vllm_pyramid.attention.step_end import StepEndEviction
from vllm_pyramid.plan import EvictionPoint, IntArray, LevelPlan
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import CacheHooks, LayerHooks, MethodHooks, WorkerContext
from vllm_pyramid.step.recent_queries import Copies, RecentQueries
from vllm_pyramid.step.step import Step, WorkerRequest
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.worker.late_evictions import LateEvictions

# Of the queries that are kept; one request's may exceed it.
QUERIES_BYTES = 256 * 2**20


class AnswerLevels(LateEvictions, CacheHooks, LayerHooks):
    """Levels prompts as its base does, and their answers after every `levels_every` tokens."""

    def __init__(self, policy: Policy, context: WorkerContext) -> None:
        super().__init__(policy, context)
        wanted = policy.scorer.queries_at_step_end(policy)
        self._every = policy.schedule.levels_every
        count = max(policy.window if wanted is None else wanted, 1)
        self._queries = RecentQueries(context, count, QUERIES_BYTES)
        self._ends: dict[str, int] = {}  # tokens computed behind the latest step of a request
        self._before, self._behind = Copies(), Copies()  # made before the step scores, and then
        self._scored: list[StepEvictions] = []
        self._alone, self._is_at_step_end = MethodHooks([self]), context.at_step_end
        self._step_end = StepEndEviction.of(policy, self._alone, context.num_layers)

    def bytes_of_buffers(self) -> int:
        return self._queries.num_bytes

    def allocate(self, num_blocks: int) -> None:
        self._queries.allocate()

    # A step ---------------------------------------------------------------------------------------

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: IntArray) -> bool:
        """Return whether a step keeps queries; `computed` is not known behind prompts."""
        for request in requests:
            past = self._ends.get(request.request_id, 0) - request.initial.prompt_len
            if past >= 0 and past % self._every >= self._every - self._queries.count:
                return True
        return False

    def begin_step(self, step: Step) -> None:
        """Find the queries to keep, and the requests that come to a point."""
        self._before, self._behind, self._scored = Copies(), Copies(), []
        ends = step.computed.astype(np.int64) + step.scheduled
        self._ends.update(zip(step.request_ids, ends.tolist(), strict=True))
        past, counts, comes = ends - step.prompt_lens, *self._points(step)
        keeps = (past > 0) & (past % self._every > self._every - self._queries.count)
        rows, slots = [], []
        keep = self._queries.keep
        for row in np.flatnonzero((comes | keeps) & step.evicting).tolist():
            if not isinstance(plan := step.requests[row].initial, LevelPlan):
                continue
            point = plan.prompt_len + int(counts[row]) * self._every
            if comes[row] and (slot := keep(step, row, point, self._before)) is not None:
                rows.append(row)
                slots.append(slot)
            if keeps[row]:
                keep(step, row, point + self._every, self._behind)
        if rows:
            self._scored = self._evictions_at(step, rows, slots, counts[rows] * self._every)

    def _points(self, step: Step) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return how many points requests have behind a step, and which come to one in it."""
        before = step.computed.astype(np.int64) - step.prompt_lens
        counts = np.maximum(before + step.scheduled, 0) // self._every
        return counts, counts > np.maximum(before, 0) // self._every

    def may_fail(self, step: Step) -> bool:
        """Return whether a request comes to a point; a failure of before is told there, too."""
        return bool(self._points(step)[1].any())

    def _evictions_at(
        self, step: Step, rows: list[int], slots: list[int], generated: np.ndarray
    ) -> list[StepEvictions]:
        """Return what requests would evict at each level of the points to which they come.

        `slots` have their queries, which end where their slots do.
        """
        records = [step.requests[row] for row in rows]
        previous = step.skips[:, rows]
        levels = []
        for index, (record, count) in enumerate(zip(records, generated.tolist(), strict=True)):
            assert isinstance(record.initial, LevelPlan)
            own: Sequence[EvictionPoint] = ()
            if record.request_id not in self.without:
                point = record.initial.prompt_len + count
                own = record.initial.levels_at(point, previous[:, index])
            levels.append(own)
        has = [index for index, own in enumerate(levels) if own]
        if not has:
            return []
        previous, ends = previous[:, has], (np.array(slots)[has] + 1) * self._queries.count
        records, levels = [records[i] for i in has], [levels[i] for i in has]
        first = [own[0] for own in levels]
        evictions = StepEvictions(
            request_ids=[record.request_id for record in records],
            rows=np.array(rows)[has],
            query_ends=ends.astype(np.int32),
            query_lens=np.full(len(has), self._queries.count, np.int32),
            prompt_lens=step.prompt_lens[rows][has],
            points=np.array([point.computed for point in first], np.int32),
            plans=list(first),
            # The first if nothing was evicted: tokens are in the places of their positions.
            eviction_numbers=np.where(previous.any(axis=0), 2, 1).astype(np.int64),
            end_numbers=np.ones(len(has), np.int64),
            intervals=np.zeros(len(has), np.int64),
            previous_skips=previous,
            block_size=first[0].block_size,
            copies=[None] * len(has),
            keep=[record.keep for record in records],
            failures=step.failures,
        )
        return self._begin(evictions, levels)

    def after_attention(self, inputs: AttentionInputs) -> None:
        """Keep queries of one layer, and level the tokens of requests that come to a point."""
        self._queries.copy(inputs, self._before)
        if self._scored:
            batch = replace(inputs.batch, query=self._queries.of_layer(inputs.layer))
            at_point, first = replace(inputs, batch=batch, log_sum_exp=None), self._scored[0]
            if self._step_end is not None and self._is_at_step_end():
                self._step_end.add_layer(at_point, first, None, lambda call: (call,))
            else:
                evict_layer(self._policy, at_point, first, self._alone)
        self._queries.copy(inputs, self._behind)

    def wants_scores(self, evictions: StepEvictions) -> StepEvictions | None:
        """Return the requests whose prompts end in this step, or those that come to points."""
        is_behind = bool(self._scored) and evictions is self._scored[0]
        return evictions if is_behind else super().wants_scores(evictions)

    def take_scores(self, batch: EvictionBatch, scores: torch.Tensor) -> None:
        """Level the tokens of requests at their prompts' ends, or at points behind them."""
        is_behind = bool(self._scored) and batch.evictions is self._scored[0]
        self._level(self._scored if is_behind else self._at_levels, batch, scores)

    def end_step(self, step: Step) -> None:
        """Free the slots of requests whose queries have been used."""
        for evictions in self._scored[:1]:
            for name, point in zip(evictions.request_ids, evictions.points.tolist(), strict=True):
                self._queries.forget(name, point)
        self._before, self._behind, self._scored = Copies(), Copies(), []

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._ends.pop(request_id, None)
        self._queries.forget(request_id)
