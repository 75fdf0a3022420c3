# SPDX-License-Identifier: Apache-2.0
"""What each request of a step has given up, and whose prompt ends in it.

The worker is never told which blocks were freed. It needs no telling: the skip of a layer follows
from the request's plan, in force once the whole prompt was computed before the step began. So
preemption resets it by itself.

A plan is a function of the prompt length, on which scheduler and workers agree without a message,
or it is open until the step that ends the prompt solves it (`solve.py`). The worker then goes by
its own result from the next step on, whether or not the scheduler has heard of it by then. After a
preemption it is open again.

Shape legend: L layers, R requests of the step, E requests whose prompt ends in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.config import settle
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.plans import Eviction, OpenPlan, Plan, RetentionPlan

IntArray = npt.NDArray[np.int32]


@dataclass
class StepEvictions:
    """The requests whose prompt ends in this step; each may have something to give, or nothing.

    Attributes:
        request_ids: E names.
        rows: `[E]` int64, their rows of the batch.
        query_ends: `[E]` int32, one behind their last query in the step's query tensor.
        query_lens: `[E]` int32, their queries in the step: the last chunk of the prompt.
        prompt_lens: `[E]` int32.
        plans: E plans; open ones until they are solved in this step.
        helds: `[L, E]` int32, tokens that stay in each layer; all of them while a plan is open.
        budgets: `[E]` int32, mean tokens a layer; what an open plan came to, once it is solved.
        unsolved: indices of the requests whose plan was open when the step began.
        gives: `[E]` bool, whether the request has something to report: its plan shortens a layer,
            or was open.
        tokens_done: `[E]` int64, tokens evicted so far, over all layers; reported to the scheduler.
    """

    request_ids: list[str]
    rows: npt.NDArray[np.int64]
    query_ends: IntArray
    query_lens: IntArray
    prompt_lens: IntArray
    plans: list[Plan]
    helds: IntArray = field(init=False)
    budgets: IntArray = field(init=False)
    unsolved: npt.NDArray[np.int64] = field(init=False)
    gives: npt.NDArray[np.bool_] = field(init=False)
    tokens_done: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        is_open = np.array([isinstance(plan, OpenPlan) for plan in self.plans], bool)
        self.unsolved = np.flatnonzero(is_open)
        self.helds = np.stack([_held(plan) for plan in self.plans], axis=1)
        self.budgets = np.array([plan.budget_tokens for plan in self.plans], np.int32)
        self.gives = is_open | np.any(self.helds < self.prompt_lens, axis=0)
        self.tokens_done = np.zeros(len(self.request_ids), np.int64)

    def settle(self, index: int, keep: npt.NDArray[np.int64]) -> None:
        """The lengths of a request are solved: `keep` is `[L]`, window and sinks included.

        Raises:
            ValueError: they break the plan's promise.
        """
        plan = self.plans[index]
        assert isinstance(plan, OpenPlan), f"{self.request_ids[index]} is solved twice"
        settled = plan.settle(keep)
        self.plans[index] = settled
        self.helds[:, index] = settled.held
        self.budgets[index] = settled.budget_tokens


def _held(plan: Plan) -> IntArray:
    if isinstance(plan, OpenPlan):
        return np.full(plan.num_layers, plan.prompt_len, np.int32)
    return plan.held


@dataclass
class StepRetention:
    """One step, for all layers; built once and shared by their metadata.

    Attributes:
        skips: `[L, R]` int32 on the host, tokens below which a request's table is not valid.
        evictions: the prompts that end now, or None.
    """

    skips: IntArray
    evictions: StepEvictions | None

    @classmethod
    def nothing(cls, num_layers: int, num_reqs: int) -> StepRetention:
        """A step in which every request has its whole cache and none ends its prompt."""
        return cls(np.zeros((num_layers, num_reqs), np.int32), None)

    def report(self) -> dict[str, Eviction]:
        """What was done with each request that gives, for the scheduler."""
        if self.evictions is None:
            return {}
        evictions = self.evictions
        unsolved = set(evictions.unsolved.tolist())
        report = {}
        for i in np.flatnonzero(evictions.gives).tolist():
            plan, keep = evictions.plans[i], None
            if i in unsolved:
                assert isinstance(plan, RetentionPlan), "a prompt ended and was not solved"
                keep = tuple(plan.keep.tolist())
            report[evictions.request_ids[i]] = Eviction(int(evictions.tokens_done[i]), keep)
        return report


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
        # The skips of the request in each row, refreshed only when a row changes hands: a decode
        # step over hundreds of requests then costs two array operations, not a Python loop of them.
        self._row_plan: list[Plan | None] = [None] * max_num_reqs
        self._row_skips = np.zeros((max_num_reqs, num_layers), np.int32)

    def add(self, request_id: str, prompt_len: int, extra_args: dict[str, Any] | None) -> None:
        """A request has come (or come back): make its plan."""
        policy, budget, _ = settle(self.policy, extra_args)
        plan = policy.plan(prompt_len, self.num_layers, self.block_size, budget)
        self.remove(request_id)
        self._plans[request_id] = plan
        if isinstance(plan, OpenPlan):
            self._open[request_id] = plan

    def remove(self, request_id: str) -> None:
        """A request has finished."""
        self._plans.pop(request_id, None)
        self._open.pop(request_id, None)

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
        past_prompt = computed >= prompt_lens
        if self._open:
            for row in np.flatnonzero(~past_prompt).tolist():
                if (open_plan := self._open.get(request_ids[row])) is not None:
                    self._plans[request_ids[row]] = open_plan
        for row, request_id in enumerate(request_ids):
            plan = self._plans[request_id]
            if self._row_plan[row] is not plan:
                assert isinstance(plan, RetentionPlan) or not past_prompt[row], (
                    f"the prompt of {request_id} has ended and was not solved"
                )
                self._row_plan[row] = plan
                self._row_skips[row] = plan.skip if isinstance(plan, RetentionPlan) else 0
        skips = np.ascontiguousarray((self._row_skips[:num_reqs] * past_prompt[:, None]).T)
        ending = np.flatnonzero(~past_prompt & (computed + scheduled >= prompt_lens))
        evictions = None
        if ending.size:
            plans = [self._plans[request_ids[row]] for row in ending]
            giving = ending[[plan.evicts for plan in plans]]
            assert (computed + scheduled)[giving].tolist() == prompt_lens[giving].tolist(), (
                "a chunk crosses the end of a prompt that is to be evicted"
            )
            evictions = StepEvictions(
                request_ids=[request_ids[row] for row in ending],
                rows=ending,
                query_ends=np.cumsum(scheduled, dtype=np.int32)[ending],
                query_lens=scheduled[ending].astype(np.int32),
                prompt_lens=prompt_lens[ending].astype(np.int32),
                plans=plans,
            )
            if self.policy.needs_scores:
                short = scheduled[giving] < self.policy.window
                assert not short.any(), "a last prompt chunk is shorter than the observation window"
        self.step = StepRetention(skips, evictions)
        return self.step

    def take_report(self) -> dict[str, Eviction]:
        """The step's report to the scheduler, once. Solved plans hold from now on."""
        report = self.step.report()
        if (evictions := self.step.evictions) is not None:
            for index in evictions.unsolved.tolist():
                if evictions.request_ids[index] in self._open:
                    self._plans[evictions.request_ids[index]] = evictions.plans[index]
        self.step.evictions = None
        return report

    def idle_step(self, num_reqs: int) -> StepRetention:
        """A step without real requests (profiling, warm-up, graph capture)."""
        self.step = StepRetention.nothing(self.num_layers, num_reqs)
        return self.step
