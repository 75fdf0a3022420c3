# SPDX-License-Identifier: Apache-2.0
"""Levels of generated tokens, for orders that evict answers (`PressureSchedule.answers`).

    generated tokens   0 ............ a - q .......... a ............ 2a - q ......... 2a
    a step             as any         keeps queries    levels anew    as any           ...

At a point all tokens of a request get levels, as at a prompt's end: they are scored by their last
`q` queries. A decode step has one query, so layers keep those of the steps before a point, in a
memory with places for some requests. One that finds no place keeps the levels that it has.

Shape legend: P places, Q queries, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from vllm_pyramid.plan import IntArray, LevelPlan
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.hooks import CacheHooks, LayerHooks, WorkerContext
from vllm_pyramid.step.step import Step, WorkerRequest
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.upload import upload
from vllm_pyramid.worker.late_evictions import LateEvictions

# Of the queries that are kept; one request's may exceed it.
QUERIES_BYTES = 256 * 2**20


class _Copies:
    """Which queries of a step are kept, and where: the same in all layers."""

    def __init__(self) -> None:
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._uploaded: torch.Tensor | None = None

    def add(self, source: int, target: int, count: int) -> None:
        """Add queries in a row."""
        self._sources.extend(range(source, source + count))
        self._targets.extend(range(target, target + count))

    def make(self, query: torch.Tensor, memory: torch.Tensor) -> None:
        """Copy rows of `query` to rows of `memory`, `[P * Q, H, D]`."""
        if not self._sources:
            return
        if self._uploaded is None:
            self._uploaded = upload(np.array([self._sources, self._targets]), query.device)
        sources, targets = self._uploaded
        memory.index_copy_(0, targets, query.index_select(0, sources))


class AnswerLevels(LateEvictions, CacheHooks, LayerHooks):
    """Levels prompts as its base does, and their answers after every `levels_every` tokens."""

    def __init__(self, policy: Policy, context: WorkerContext) -> None:
        super().__init__(policy, context)
        config, wanted = context.config, policy.scorer.queries_at_step_end(policy)
        self._every = policy.schedule.levels_every
        self._queries = max(policy.window if wanted is None else wanted, 1)
        model, dtype = config.model_config, config.model_config.dtype
        heads = model.get_num_attention_heads(config.parallel_config)
        size = max((spec.head_size for spec in context.specs), default=0)
        assert isinstance(dtype, torch.dtype), "vLLM replaces names such as 'auto'"
        self._bytes_of_each = context.num_layers * self._queries * heads * size * dtype.itemsize
        most = max(QUERIES_BYTES // max(self._bytes_of_each, 1), 1)
        self._free = list(range(min(most, config.scheduler_config.max_num_seqs)))
        self._num_places = len(self._free)
        self._memory: dict[int, torch.Tensor] = {}  # by layer, [P * Q, H, D]
        self._places: dict[str, int] = {}
        self._points: dict[str, int] = {}  # for which a place has queries
        self._ends: dict[str, int] = {}  # tokens computed behind the latest step of a request
        self._before, self._behind = _Copies(), _Copies()  # made before the step scores, and then
        self._scored: list[StepEvictions] = []
        self._of_scored = np.zeros(0, np.int64)  # their places

    def bytes_of_buffers(self) -> int:
        return self._num_places * self._bytes_of_each

    # A step ---------------------------------------------------------------------------------------

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: IntArray) -> bool:
        """Return whether a step keeps queries; `computed` is not known behind prompts."""
        for request in requests:
            past = self._ends.get(request.request_id, 0) - request.initial.prompt_len
            if past >= 0 and past % self._every >= self._every - self._queries:
                return True
        return False

    def begin_step(self, step: Step) -> None:
        """Find the queries to keep, and the requests that come to a point."""
        self._before, self._behind, self._scored = _Copies(), _Copies(), []
        ends = step.computed.astype(np.int64) + step.scheduled
        self._ends.update(zip(step.request_ids, ends.tolist(), strict=True))
        past = ends - step.prompt_lens
        counts = np.maximum(past, 0) // self._every
        comes = counts > np.maximum(step.computed - step.prompt_lens, 0) // self._every
        keeps = (past > 0) & (past % self._every > self._every - self._queries)
        rows, places = [], []
        for row in np.flatnonzero((comes | keeps) & step.evicting).tolist():
            if not isinstance(plan := step.requests[row].initial, LevelPlan):
                continue
            point = plan.prompt_len + int(counts[row]) * self._every
            if comes[row] and (place := self._keep(step, row, point, self._before)) is not None:
                rows.append(row)
                places.append(place)
            if keeps[row]:
                self._keep(step, row, point + self._every, self._behind)
        if rows:
            self._of_scored = np.array(places)
            self._scored = self._evictions_at(step, rows, counts[rows] * self._every)

    def _keep(self, step: Step, row: int, point: int, copies: _Copies) -> int | None:
        """Keep the queries of a request that the step has of the last ones before a point.

        Returns:
            Its place; None if it has none, which it gets with the first of these queries.
        """
        name, start = step.requests[row].request_id, point - self._queries
        computed, end = int(step.computed[row]), int(step.computed[row] + step.scheduled[row])
        first, last = max(computed, start), min(end, point)
        if first == start:
            if name not in self._places and self._free:
                self._places[name] = self._free.pop()
            self._points[name] = point
        if name not in self._places or self._points.get(name) != point:
            return None
        place = self._places[name]
        source = int(step.scheduled[:row].sum()) + first - computed
        copies.add(source, place * self._queries + first - start, last - first)
        return place

    def _evictions_at(
        self, step: Step, rows: list[int], generated: np.ndarray
    ) -> list[StepEvictions]:
        """Return what requests would evict at each level of the points to which they come."""
        records = [step.requests[row] for row in rows]
        previous = step.skips[:, rows]
        levels = []
        for index, (record, count) in enumerate(zip(records, generated.tolist(), strict=True)):
            assert isinstance(record.initial, LevelPlan)
            point = record.initial.prompt_len + count
            levels.append(record.initial.levels_at(point, previous[:, index]))
        has = [index for index, own in enumerate(levels) if own]
        if not has:
            return []
        self._of_scored, previous = self._of_scored[has], previous[:, has]
        records, levels = [records[i] for i in has], [levels[i] for i in has]
        first = [own[0] for own in levels]
        evictions = StepEvictions(
            request_ids=[record.request_id for record in records],
            rows=np.array(rows)[has],
            query_ends=((np.arange(len(has)) + 1) * self._queries).astype(np.int32),
            query_lens=np.full(len(has), self._queries, np.int32),
            prompt_lens=step.prompt_lens[rows][has],
            points=np.array([point.computed for point in first], np.int32),
            plans=list(first),
            # The first if nothing was evicted: tokens are in the places of their positions.
            eviction_numbers=[1 + bool(column.any()) for column in previous.T],
            end_numbers=[1] * len(has),
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
        memory = self._memory_of(inputs)
        self._before.make(inputs.query, memory)
        if self._scored:
            places = upload(self._of_scored, memory.device)
            query = memory.unflatten(0, (-1, self._queries)).index_select(0, places).flatten(0, 1)
            batch = replace(inputs.batch, query=query)
            try:
                self._level_all(replace(inputs, batch=batch, log_sum_exp=None), self._scored)
            except Exception as error:
                names, asks = self._scored[0].request_ids, self._policy.scorer.asks_ranks
                what = f"levels of the policy {self._policy.name!r}"
                self._step().failures.add_error(names, what, error, peers_wait=asks)
        self._behind.make(inputs.query, memory)

    def _memory_of(self, inputs: AttentionInputs) -> torch.Tensor:
        if (found := self._memory.get(inputs.layer)) is None:
            rows = self._num_places * self._queries
            found = inputs.query.new_empty(rows, *inputs.query.shape[1:])
            self._memory[inputs.layer] = found
        return found

    def end_step(self, step: Step) -> None:
        """Free the places of requests whose queries have been used."""
        for evictions in self._scored[:1]:
            for name, point in zip(evictions.request_ids, evictions.points, strict=True):
                if self._points.get(name) == point:
                    self._release(name)
        self._before, self._behind, self._scored = _Copies(), _Copies(), []

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._ends.pop(request_id, None)
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        self._points.pop(request_id, None)
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place)
