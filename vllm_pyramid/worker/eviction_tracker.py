# SPDX-License-Identifier: Apache-2.0
"""The plans of the requests that a worker knows, and what follows from them in each step.

The worker is never told which blocks were freed. It needs no telling: the skip of a layer follows
from the request's plan and the tokens computed before the step began. So preemption resets it by
itself. A request evicts at the end of its prompt and, where the plan says so, at points inside it
and every so many tokens after it; a step never computes tokens on both sides of such a point.

A plan is a function of the prompt length, on which scheduler and workers agree without a message,
or it is open until the step that ends the prompt solves it (`methods/solved`). The worker then goes
by its own result from the next step on, whether or not the scheduler has heard of it by then. After
a preemption it is open again.

Shape legend: L layers, R requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import Eviction, Plan
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.policy.request import for_request
from vllm_pyramid.step.hooks import WorkerHooks
from vllm_pyramid.step.step import Step, StepEvictions, WorkerRequest

IntArray = npt.NDArray[np.int32]


class EvictionTracker:
    """The requests that a model runner knows, and the current step.

    Args:
        policy: the engine's policy. num_layers: L. block_size: tokens of a cache block.
        max_num_reqs: rows of the runner's batch.

    Attributes:
        hooks: of the methods at work; set once the runner has made them.
        copies: of the step's evictions, the blocks that take copies of what they overwrite, by
            request id; set from the scheduler's output.
    """

    def __init__(self, policy: Policy, num_layers: int, block_size: int, max_num_reqs: int) -> None:
        self.policy = policy
        self.num_layers = num_layers
        self.block_size = block_size
        self.step = Step.nothing(num_layers, 0)
        self.hooks: list[WorkerHooks] = []
        self.copies: dict[str, list[int]] = {}
        self._requests: dict[str, WorkerRequest] = {}
        self._num_open = 0  # of requests whose plan was open when they came
        # The skips of the request in each row, refreshed only when a row changes hands or its
        # request has evicted: a decode step over hundreds of requests then costs a few array
        # operations, not a Python loop over them.
        self._row_plan: list[Plan | None] = [None] * max_num_reqs
        self._row_skips = np.zeros((max_num_reqs, num_layers), np.int32)
        self._row_number = np.zeros(max_num_reqs, np.int64)  # of the eviction that they are of
        self._row_every = np.zeros(max_num_reqs, np.int64)
        self._row_inner = np.zeros(max_num_reqs, np.int64)  # `Step.inner`
        self._row_evicts = np.zeros(max_num_reqs, bool)

    def add(self, request_id: str, prompt_len: int, extra_args: dict[str, Any] | None) -> None:
        """A request has come (or come back): make its plan."""
        served = for_request(self.policy, extra_args)
        plan = served.plan(prompt_len, self.num_layers, self.block_size)
        self.remove(request_id)
        self._requests[request_id] = WorkerRequest(request_id, served.policy, plan, plan)
        self._num_open += plan.is_deferred

    def remove(self, request_id: str) -> None:
        """A request has finished."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._num_open -= request.initial.is_deferred
            for hooks in self.hooks:
                hooks.forget(request_id)

    def without_graphs(self, request_ids: Sequence[str], computed: IntArray) -> bool:
        """Whether the step that is about to begin must run without CUDA graphs.

        Args: as of `begin_step`, in any order; behind prompts `computed` may be anything.
        """
        return any(
            hooks.without_graphs((self._requests[name] for name in request_ids), computed)
            for hooks in self.hooks
        )

    def begin_step(
        self,
        request_ids: Sequence[str],
        prompt_lens: IntArray,
        computed: IntArray,
        scheduled: IntArray,
    ) -> Step:
        """Work out the step's skips and evictions, and let the methods begin it.

        Args:
            request_ids: R names, in batch order; each was given to `add`.
            prompt_lens: `[R]` tokens of the prompts (without generated tokens).
            computed: `[R]` tokens computed before the step. scheduled: `[R]` tokens of the step.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        num_reqs = len(requests)
        if self._num_open:
            for row in np.flatnonzero(computed < prompt_lens).tolist():
                requests[row].plan = requests[row].initial
        for row, request in enumerate(requests):
            plan = request.plan
            if self._row_plan[row] is not plan:
                self._row_plan[row] = plan
                self._row_every[row] = plan.every
                self._row_inner[row] = len(plan.inner)
                self._row_evicts[row] = plan.evicts
                self._row_number[row] = -1
        before = self._numbers(requests, prompt_lens, computed)
        for row in np.flatnonzero(before != self._row_number[:num_reqs]).tolist():
            self._row_number[row] = before[row]
            self._row_skips[row] = requests[row].plan.skip_after(int(before[row]))
        skips = np.ascontiguousarray(self._row_skips[:num_reqs].T)
        after = self._numbers(requests, prompt_lens, computed + scheduled)
        ending = np.flatnonzero(after > before)
        evictions = None
        if ending.size:
            evictions = self._evictions(requests, computed, scheduled, ending, after, skips)
        self.step = Step(
            skips,
            evictions,
            requests,
            prompt_lens,
            computed,
            scheduled,
            before,
            self._row_inner[:num_reqs],
            self._row_every[:num_reqs],
            self._row_evicts[:num_reqs],
        )
        for hooks in self.hooks:
            hooks.begin_step(self.step)
        return self.step

    def _numbers(
        self, requests: Sequence[WorkerRequest], prompt_lens: IntArray, computed: IntArray
    ) -> npt.NDArray[np.int64]:
        """`RetentionPlan.evictions_by` of all rows: `[R]`."""
        every, count = self._row_every[: len(computed)], self._row_inner[: len(computed)]
        past = computed.astype(np.int64) - prompt_lens
        later = np.where(every > 0, past // np.maximum(every, 1), 0)
        numbers = np.where(past >= 0, count + 1 + later, 0)
        for row in np.flatnonzero((past < 0) & (count > 0)).tolist():
            numbers[row] = requests[row].plan.evictions_by(int(computed[row]))
        return numbers

    def _evictions(
        self,
        requests: list[WorkerRequest],
        computed: IntArray,
        scheduled: IntArray,
        ending: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        skips: IntArray,
    ) -> StepEvictions:
        """Of the rows `ending`, which come to the evictions `numbers`, `[R]`, in this step."""
        plans = [requests[row].plan for row in ending]
        after = computed + scheduled
        for row, plan in zip(ending.tolist(), plans, strict=True):
            assert not plan.evicts or after[row] == plan.next_eviction(computed[row]), (
                "a chunk crosses an eviction"
            )
        of_ending = [int(numbers[row]) for row in ending]
        pairs = list(zip(plans, of_ending, strict=True))
        from_end = np.array([number - plan.end_number for plan, number in pairs])
        previous_skips = skips[:, ending]
        giving = np.array(
            [
                plan.is_deferred or bool((plan.skip_after(number) != before).any())
                for (plan, number), before in zip(pairs, previous_skips.T, strict=True)
            ]
        )
        inside = self.policy.inner_policy or self.policy
        for policy, there in ((self.policy, from_end >= 0), (inside, from_end < 0)):
            if policy.scorer.needs_queries:
                short = scheduled[ending[giving & there]] < policy.window
                assert not short.any(), "a last prompt chunk is shorter than the observation window"
        ends = [plan.computed_at(number) for plan, number in pairs]
        return StepEvictions(
            request_ids=[requests[row].request_id for row in ending],
            rows=ending,
            query_ends=np.cumsum(scheduled, dtype=np.int32)[ending],
            query_lens=scheduled[ending].astype(np.int32),
            prompt_lens=np.array(ends, np.int32),
            plans=[plan.after(number) for plan, number in pairs],
            numbers=of_ending,
            from_end=from_end,
            previous_skips=previous_skips,
            of_prompts=np.array([requests[row].initial.prompt_len for row in ending], np.int32),
            every=self._row_every[ending],
            block_size=self.block_size,
            copies=[self.copies.get(requests[row].request_id) for row in ending],
        )

    def end_step(self) -> tuple[dict[str, Eviction], dict[str, Any]]:
        """The reports to the scheduler, once: evictions by request, and those of the methods.

        Solved plans hold from now on.
        """
        step = self.step
        for hooks in self.hooks:
            hooks.end_step(step)
        evictions = step.report()
        if step.evictions is not None:
            for index in step.evictions.unsolved.tolist():
                request = step.requests[int(step.evictions.rows[index])]
                assert request.initial.is_deferred
                request.plan = step.evictions.resolved[index]
        step.evictions = None
        reports: dict[str, Any] = {}
        for hooks in self.hooks:
            if (report := hooks.report()) is not None:
                assert hooks.name and hooks.name not in reports, f"{type(hooks)} needs a name"
                reports[hooks.name] = report
        return evictions, reports

    def idle_step(self, num_reqs: int) -> Step:
        """A step without real requests (profiling, warm-up, graph capture)."""
        self.step = Step.nothing(self.num_layers, num_reqs)
        for hooks in self.hooks:
            hooks.end_step(self.step)
            hooks.report()
        return self.step
