# SPDX-License-Identifier: Apache-2.0
"""The plans of the requests that a worker knows, and what follows from them in each step.

The worker is never told which blocks were freed. It needs no telling: the skip of a layer follows
from the request's plan and the tokens computed before the step began. So preemption resets it by
itself. A request evicts at the end of its prompt and, where the plan says so, every so many tokens
after it; a step never computes tokens on both sides of such a point.

A plan is a function of the prompt length, on which scheduler and workers agree without a message,
or it is open until the step that ends the prompt solves it (`solve.py`). The worker then goes by
its own result from the next step on, whether or not the scheduler has heard of it by then. After a
preemption it is open again.

Shape legend: L layers, R requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.plans import Eviction, OpenPlan, Piece, Plan, RetentionPlan
from vllm_pyramid.request_config import settle
from vllm_pyramid.worker.choice import StepChoice
from vllm_pyramid.worker.step import StepEvictions, StepRetention
from vllm_pyramid.worker.thinning import StepThinning

IntArray = npt.NDArray[np.int32]

# A position that no query reaches: the mass of such a request is not needed.
NO_QUERY = np.iinfo(np.int32).max


class Retention:
    """The plans of the requests that a model runner knows, and the current step.

    Args:
        policy: the engine's policy. num_layers: L. block_size: tokens of a cache block.
        max_num_reqs: rows of the runner's batch.
    """

    def __init__(self, policy: Policy, num_layers: int, block_size: int, max_num_reqs: int) -> None:
        self.policy = policy
        self.num_layers = num_layers
        self.block_size = block_size
        self.step = StepRetention.nothing(num_layers, 0)
        self._plans: dict[str, Plan] = {}  # settled ones take the place of open ones
        self._open: dict[str, OpenPlan] = {}  # what a request that is recomputed begins with
        self._given: dict[str, int] = {}  # tokens that thinned requests have given up so far
        # The skips of the request in each row, refreshed only when a row changes hands or its
        # request has evicted: a decode step over hundreds of requests then costs a few array
        # operations, not a Python loop over them.
        self._row_plan: list[Plan | None] = [None] * max_num_reqs
        self._row_skips = np.zeros((max_num_reqs, num_layers), np.int32)
        self._row_number = np.zeros(max_num_reqs, np.int64)  # of the eviction that they are of
        self._row_every = np.zeros(max_num_reqs, np.int64)
        self._row_evicts = np.zeros(max_num_reqs, bool)
        self._scorer = policy.gatherer
        self._top_n: dict[str, int] = {}  # of requests, with a policy that keeps V on the host

    def add(self, request_id: str, prompt_len: int, extra_args: dict[str, Any] | None) -> None:
        """A request has come (or come back): make its plan."""
        policy, budget, _ = settle(self.policy, extra_args)
        plan = policy.plan(prompt_len, self.num_layers, self.block_size, budget)
        self.remove(request_id)
        self._plans[request_id] = plan
        if isinstance(plan, OpenPlan):
            self._open[request_id] = plan
        if policy.swap_v:
            self._top_n[request_id] = policy.top_n

    def remove(self, request_id: str) -> None:
        """A request has finished."""
        self._plans.pop(request_id, None)
        self._open.pop(request_id, None)
        self._top_n.pop(request_id, None)
        self._given.pop(request_id, None)

    def begin_step(
        self,
        request_ids: Sequence[str],
        prompt_lens: IntArray,
        computed: IntArray,
        scheduled: IntArray,
    ) -> StepRetention:
        """Work out the step's skips and evictions.

        Args:
            request_ids: R names, in batch order; each was given to `add`.
            prompt_lens: `[R]` tokens of the prompts (without generated tokens).
            computed: `[R]` tokens computed before the step. scheduled: `[R]` tokens of the step.
        """
        num_reqs = len(request_ids)
        if self._open:
            for row in np.flatnonzero(computed < prompt_lens).tolist():
                if (open_plan := self._open.get(request_ids[row])) is not None:
                    self._plans[request_ids[row]] = open_plan
        for row, request_id in enumerate(request_ids):
            plan = self._plans[request_id]
            if self._row_plan[row] is not plan:
                self._row_plan[row] = plan
                self._row_every[row] = plan.every if isinstance(plan, RetentionPlan) else 0
                self._row_evicts[row] = plan.evicts
                self._row_number[row] = -1
        before = self._numbers(prompt_lens, computed)
        for row in np.flatnonzero(before != self._row_number[:num_reqs]).tolist():
            plan = self._plans[request_ids[row]]
            assert isinstance(plan, RetentionPlan) or before[row] == 0, (
                f"the prompt of {request_ids[row]} has ended and was not solved"
            )
            self._row_number[row] = before[row]
            self._row_skips[row] = (
                plan.skip_after(int(before[row])) if isinstance(plan, RetentionPlan) else 0
            )
        skips = np.ascontiguousarray(self._row_skips[:num_reqs].T)
        after = self._numbers(prompt_lens, computed + scheduled)
        ending = np.flatnonzero(after > before)
        evictions = None
        if ending.size:
            evictions = self._evictions(request_ids, computed, scheduled, ending, after, skips)
        first_queries = None
        if self._scorer is not None:
            first_queries = self._first_queries(prompt_lens, before)
        thinning = None
        if self.policy.thinner is not None:
            thinning = self._thinning(request_ids, computed, scheduled, before == 0, skips)
        choice = None
        if self.policy.swap_v:
            choice = self._choice(request_ids, prompt_lens, computed, scheduled)
        self.step = StepRetention(skips, evictions, first_queries, choice, thinning)
        return self.step

    def _choice(
        self,
        request_ids: Sequence[str],
        prompt_lens: IntArray,
        computed: IntArray,
        scheduled: IntArray,
    ) -> StepChoice:
        """How many keys each row uses: all of them until its prompt has been processed."""
        past_prompt = computed >= prompt_lens
        within = past_prompt | (computed + scheduled <= prompt_lens)
        assert within.all(), "a chunk crosses the end of a prompt, where keys are chosen from"
        top_ns = np.array([self._top_n.get(name, 0) for name in request_ids], np.int32)
        return StepChoice(
            list(request_ids),
            scheduled,
            past_prompt,
            top_ns * past_prompt,
            np.zeros(len(request_ids), np.int64),
        )

    def _thinning(
        self,
        request_ids: Sequence[str],
        computed: IntArray,
        scheduled: IntArray,
        in_prompt: npt.NDArray[np.bool_],
        skips: IntArray,
    ) -> StepThinning | None:
        """The pieces of the step; a plan that has any wants each of them whole in one step."""
        rows: list[int] = []
        pieces: list[Piece] = []
        for row in np.flatnonzero(in_prompt).tolist():
            plan = self._plans[request_ids[row]]
            assert isinstance(plan, RetentionPlan)
            if (piece := plan.piece_at(int(computed[row]))) is not None:
                rows.append(row)
                pieces.append(piece)
        if not rows:
            return None
        return StepThinning(
            [request_ids[row] for row in rows],
            np.array(rows, np.int64),
            pieces,
            np.asarray(scheduled, np.int32),
            np.asarray(computed, np.int32),
            skips,
            self._given,
        )

    def _numbers(self, prompt_lens: IntArray, computed: IntArray) -> npt.NDArray[np.int64]:
        """`RetentionPlan.evictions_by` of all rows: `[R]`."""
        every = self._row_every[: len(computed)]
        past = computed.astype(np.int64) - prompt_lens
        later = np.where(every > 0, past // np.maximum(every, 1), 0)
        return np.where(past >= 0, 1 + later, 0)

    def _first_queries(self, prompt_lens: IntArray, before: npt.NDArray[np.int64]) -> IntArray:
        """From which query on the next eviction of each row looks: `[R]`."""
        assert self._scorer is not None
        every = self._row_every[: len(before)]
        point = prompt_lens + before * every
        first = np.zeros_like(point)
        if self._scorer.history is not None:
            first = np.maximum(point - self._scorer.history, 0)
        looks = self._row_evicts[: len(before)] & ((before == 0) | (every > 0))
        if self.policy.thinner is not None:
            looks &= before > 0  # prompts are thinned by what their pieces say
        return np.where(looks, first, NO_QUERY).astype(np.int32)

    def _evictions(
        self,
        request_ids: Sequence[str],
        computed: IntArray,
        scheduled: IntArray,
        ending: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        skips: IntArray,
    ) -> StepEvictions:
        """Of the rows `ending`, which come to the evictions `numbers`, `[R]`, in this step."""
        plans = [self._plans[request_ids[row]] for row in ending]
        after = computed + scheduled
        for row, plan in zip(ending.tolist(), plans, strict=True):
            assert not plan.evicts or after[row] == plan.next_eviction(computed[row]), (
                "a chunk crosses an eviction"
            )
        if self.policy.needs_scores:
            giving = ending[[plan.evicts for plan in plans]]
            short = scheduled[giving] < self.policy.window
            assert not short.any(), "a last prompt chunk is shorter than the observation window"
        of_ending = [int(numbers[row]) for row in ending]
        ends = [
            plan.computed_at(number) if isinstance(plan, RetentionPlan) else plan.prompt_len
            for plan, number in zip(plans, of_ending, strict=True)
        ]
        return StepEvictions(
            request_ids=[request_ids[row] for row in ending],
            rows=ending,
            query_ends=np.cumsum(scheduled, dtype=np.int32)[ending],
            query_lens=scheduled[ending].astype(np.int32),
            prompt_lens=np.array(ends, np.int32),
            plans=[
                plan if number == 1 or isinstance(plan, OpenPlan) else plan.after(number)
                for plan, number in zip(plans, of_ending, strict=True)
            ],
            numbers=of_ending,
            befores=skips[:, ending],
        )

    def take_report(self) -> dict[str, Eviction]:
        """The step's report to the scheduler, once. Solved plans hold from now on."""
        if (evictions := self.step.evictions) is not None:
            for index, plan in enumerate(evictions.plans):
                if isinstance(plan, RetentionPlan) and plan.pieces:
                    evictions.tokens_done[index] = self._given[evictions.request_ids[index]]
        report = self.step.report()
        if evictions is not None:
            for index in evictions.unsolved.tolist():
                if evictions.request_ids[index] in self._open:
                    self._plans[evictions.request_ids[index]] = evictions.plans[index]
        self.step.evictions = None
        self.step.thinning = None
        return report

    def idle_step(self, num_reqs: int) -> StepRetention:
        """A step without real requests (profiling, warm-up, graph capture)."""
        self.step = StepRetention.nothing(self.num_layers, num_reqs)
        return self.step
