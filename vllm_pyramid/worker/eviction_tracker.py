# SPDX-License-Identifier: Apache-2.0
"""The plans of the requests that a worker knows, and what follows from them in each step.

The scheduler never tells the worker which blocks it has freed: the skip of a layer follows from the
request's plan and the tokens computed before the step, so a preemption resets it. No step computes
tokens on both sides of an eviction.

A plan is a function of the prompt length, which scheduler and workers compute without a message, or
it is open until the step that ends the prompt decides its lengths. The worker uses its own result
from the next step on. After a preemption the plan is open again.

Shape legend: L layers, R requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from vllm_pyramid.plan import Eviction, LevelPlan, Order, Plan, PlanMismatchError, RetentionPlan
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.policy.request import KEEP_EVERYTHING, for_request
from vllm_pyramid.policy.request_keys import AUTO_MODE
from vllm_pyramid.step.failures import Failures
from vllm_pyramid.step.hooks import MethodHooks
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.step.step import Step, WorkerRequest
from vllm_pyramid.step.step_evictions import StepEvictions

IntArray = npt.NDArray[np.int32]

logger = init_logger(f"vllm.{__name__}")


class EvictionTracker:
    """The requests that a model runner knows, and the current step.

    Args:
        block_size: tokens of the largest cache block.
        num_layers: L; KV heads with block tables of their own count as layers.
        max_num_reqs: rows of the runner's batch. turn_mode, why_no_turns: see `ServedSettings`.

    Attributes:
        hooks: the hooks of the policy's methods; set by the runtime, which makes them.
        copies: the blocks that receive copies of what an eviction of the step overwrites, by
            request id; set from the scheduler's output.
    """

    def __init__(
        self,
        policy: Policy,
        num_layers: int,
        block_size: int,
        max_num_reqs: int,
        turn_mode: str = AUTO_MODE,
        why_no_turns: str | None = None,
    ) -> None:
        self.policy = policy
        self._turns = turn_mode, why_no_turns
        self.num_layers = num_layers
        self.block_size = block_size
        self.step = Step.nothing(num_layers, 0)
        self.hooks = MethodHooks()
        self.failures = Failures()
        self._log = LimitedLog(logger.error)
        self.copies: dict[str, list[int]] = {}
        self._requests: dict[str, WorkerRequest] = {}
        self._num_open = 0  # requests whose plan changes: an open one, or one that awaits orders
        self._ordered: dict[str, Eviction] = {}  # not reported yet
        # Of each row of the batch, updated only where the row has another request or its request
        # has evicted: a decode step over hundreds of requests costs a few array operations.
        self._row_plan: list[Plan | None] = [None] * max_num_reqs
        self._row_skips = np.zeros((max_num_reqs, num_layers), np.int32)
        # Of the eviction that `_row_skips` hold after; -1: the row's plan has changed.
        self._row_number = np.zeros(max_num_reqs, np.int64)
        # As `Step.intervals`, `Step.inner_evictions` and `Step.evicting`.
        self._row_interval = np.zeros(max_num_reqs, np.int64)
        self._row_inner = np.zeros(max_num_reqs, np.int64)
        self._row_evicting = np.zeros(max_num_reqs, bool)

    def add(
        self,
        request_id: str,
        prompt_len: int,
        extra_args: dict[str, Any] | None,
        computed: int = 0,
    ) -> None:
        """Make the plan of a request that has arrived, or that was preempted and comes again.

        The scheduler has made the same plan. If a method of the policy raises here all the same,
        the request keeps everything until the scheduler ends it. A request that begins with its
        whole prompt `computed` comes from another engine, which has evicted it: it gets no levels.
        """
        self.remove(request_id)
        try:
            served = for_request(self.policy, extra_args, *self._turns)
            plan = served.plan(prompt_len, self.num_layers, self.block_size)
        except Exception as error:
            # Other workers may have made the plan, and will evict.
            what = f"the plan of the policy {self.policy.name!r}"
            self.failures.add_error([request_id], what, error, peers_wait=True)
            served = for_request(self.policy, KEEP_EVERYTHING)
            plan = served.plan(prompt_len, self.num_layers, self.block_size)
        keep = served.keep if not served.policy.schedule.keeps_prompts else ()  # they stay with it
        now = plan.estimate() if plan.waits_for_orders and computed >= prompt_len else plan
        self._requests[request_id] = WorkerRequest(request_id, served.policy, now, plan, keep)
        self._num_open += plan.is_deferred or plan.waits_for_orders

    def order(self, request_id: str, orders: Sequence[Order]) -> RetentionPlan | None:
        """Let a request follow `orders`, of which the last is new; the next report confirms it.

        Returns the plan of these orders; None if the request has ended meanwhile.
        """
        if (request := self._requests.get(request_id)) is None:
            return None
        plan, number = request.initial, len(orders)
        if not isinstance(plan, LevelPlan):
            raise PlanMismatchError(
                f"request {request_id} is ordered to evict, and its plan has no levels: scheduler "
                "and worker disagree about the KV policy; report this"
            )
        request.plan = ordered = plan.ordered(orders)
        given = ordered.skip_after(number) - ordered.skip_after(number - 1)
        self._ordered[request_id] = Eviction(int(given.sum()), None, number)
        return ordered

    def remove(self, request_id: str) -> None:
        """Forget a request, which has finished."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._num_open -= request.initial.is_deferred or request.initial.waits_for_orders
            self.failures.forget(request_id)
            self._ordered.pop(request_id, None)
            self.lose(request_id)

    def lose(self, request_id: str) -> None:
        """Let methods forget a request, which has finished or was preempted."""
        for hooks in self.hooks.forget:
            try:
                hooks.forget(request_id)
            except Exception as error:  # the request has no blocks, and others know nothing of it
                said = hooks.label, request_id, type(error).__name__, error
                self._log(hooks.label, "`forget` of %s failed for request %s: %s: %s", *said)

    def needs_eager_step(self, request_ids: Sequence[str], computed: IntArray) -> bool:
        """Return whether the step that is about to begin must run without CUDA graphs.

        Args: as of `begin_step`, in any order; behind a prompt `computed` may be any number.
        """
        for hooks in self.hooks.without_graphs:
            try:
                if hooks.without_graphs((self._requests[name] for name in request_ids), computed):
                    return True
            except Exception as error:
                self.failures.add_error(request_ids, f"`without_graphs` of {hooks.label}", error)
                return True
        return False

    def begin_step(
        self,
        request_ids: Sequence[str],
        prompt_lens: IntArray,
        computed: IntArray,
        scheduled: IntArray,
    ) -> Step:
        """Compute the step's skips and evictions, and let the methods begin it.

        Args:
            request_ids: R names, in batch order; each was given to `add`.
            prompt_lens, scheduled: `[R]` tokens of the prompts, and of the step.
            computed: `[R]` tokens computed before the step.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        num_reqs = len(requests)
        if self._num_open:
            for row in np.flatnonzero(computed < prompt_lens).tolist():
                requests[row].plan = requests[row].initial
                self._ordered.pop(request_ids[row], None)  # before a preemption
        for row, request in enumerate(requests):
            plan = request.plan
            if self._row_plan[row] is not plan:
                self._row_plan[row] = plan
                self._row_interval[row] = plan.every
                self._row_inner[row] = len(plan.inner)
                self._row_evicting[row] = plan.evicts
                self._row_number[row] = -1
        before = self._eviction_numbers(requests, prompt_lens, computed)
        for row in np.flatnonzero(before != self._row_number[:num_reqs]).tolist():
            self._row_number[row] = before[row]
            self._row_skips[row] = requests[row].plan.skip_after(int(before[row]))
        skips = self._row_skips[:num_reqs].T.copy()
        after = self._eviction_numbers(requests, prompt_lens, computed + scheduled)
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
            self._row_interval[:num_reqs],
            self._row_evicting[:num_reqs],
            failures=self.failures,
        )
        for hooks in self.hooks.begin_step:
            try:
                needs = hooks.begin_step(self.step)
            except Exception as error:
                # Ranks that know less of the step than others might wait for one another.
                self.step.add_error(
                    f"`begin_step` of {hooks.label}", error, peers_wait=hooks.asks_ranks
                )
                continue
            if needs is not None:
                self.step.add_needs(needs)
        return self.step

    def _eviction_numbers(
        self, requests: Sequence[WorkerRequest], prompt_lens: IntArray, computed: IntArray
    ) -> npt.NDArray[np.int64]:
        """Return the number of evictions by `computed` tokens of all rows, `[R]`.

        It is `RetentionPlan.evictions_by`, looped over prompts with evictions inside alone.
        """
        intervals, inner = self._row_interval[: len(computed)], self._row_inner[: len(computed)]
        past_prompt = computed.astype(np.int64) - prompt_lens
        later = np.where(intervals > 0, past_prompt // np.maximum(intervals, 1), 0)
        numbers = np.where(past_prompt >= 0, inner + 1 + later, 0)
        for row in np.flatnonzero((past_prompt < 0) & (inner > 0)).tolist():
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
        """Return the evictions of the rows `ending`, whose numbers are among `numbers`, `[R]`."""
        records = [requests[row] for row in ending.tolist()]
        after = computed + scheduled
        for row, record in zip(ending.tolist(), records, strict=True):
            plan = record.plan
            if plan.evicts and after[row] != (point := plan.next_eviction(computed[row])):
                raise PlanMismatchError(
                    f"request {record.request_id}: a chunk of {scheduled[row]} tokens behind "
                    f"{computed[row]} crosses the eviction at {point}: scheduler and worker "
                    "disagree about the KV policy; report this"
                )
        both = zip(records, numbers[ending].tolist(), strict=True)
        evicting = [(record.plan, number) for record, number in both]
        evictions = StepEvictions(
            request_ids=[record.request_id for record in records],
            rows=ending,
            query_ends=np.cumsum(scheduled, dtype=np.int32)[ending],
            query_lens=scheduled[ending].astype(np.int32),
            prompt_lens=np.array([record.initial.prompt_len for record in records], np.int32),
            points=np.array([plan.computed_at(number) for plan, number in evicting], np.int32),
            plans=[plan.after(number) for plan, number in evicting],
            eviction_numbers=numbers[ending],
            end_numbers=np.array([plan.end_number for plan, _ in evicting]),
            intervals=self._row_interval[ending],
            previous_skips=skips[:, ending],
            block_size=self.block_size,
            copies=[self.copies.get(record.request_id) for record in records],
            keep=[record.keep for record in records],
            failures=self.failures,
        )
        self._check_queries(evictions, evicting)
        return evictions

    def _check_queries(
        self, evictions: StepEvictions, evicting: Sequence[tuple[Plan, int]]
    ) -> None:
        """Check that requests which give something up have the queries that scorers look at.

        PlanMismatchError: a scorer would read the queries of another request.
        """
        skips_change = np.array(
            [
                plan.is_deferred
                or (isinstance(plan, LevelPlan) and bool(plan.levels))
                or bool((plan.skip_after(number) != previous).any())
                for (plan, number), previous in zip(
                    evicting, evictions.previous_skips.T, strict=True
                )
            ]
        )
        inside, policy = evictions.inside_prompt, self.policy
        for part, is_part in ((policy, ~inside), (policy.inner_policy or policy, inside)):
            if part.scorer.needs_queries:
                is_short = evictions.query_lens[skips_change & is_part] < part.window
                for index in np.flatnonzero(is_short).tolist():
                    raise PlanMismatchError(
                        f"request {evictions.request_ids[index]}: the last chunk before an "
                        f"eviction has {evictions.query_lens[index]} tokens, fewer than the window "
                        f"of {part.window}: scheduler and worker disagree about the KV policy; "
                        "report this"
                    )

    def end_step(self) -> tuple[dict[str, Eviction], dict[str, Any]]:
        """Return the step's reports: evictions by request, and the methods'; its plans hold now."""
        step, reports = self.step, dict[str, Any]()
        for hooks in self.hooks.end_step:
            try:
                report = hooks.end_step(step)
            except Exception as error:
                what = f"`end_step` of {hooks.label}"
                step.failures.add_error(step.request_ids, what, error, peers_wait=hooks.asks_ranks)
                continue
            if report is not None:
                if not hooks.name or hooks.name in reports:
                    raise RuntimeError(
                        f"{type(hooks).__qualname__} reports on its steps and has no `name` of its "
                        f"own: {hooks.name!r}"
                    )
                reports[hooks.name] = report
        evictions = step.report() | self._ordered
        self._ordered = {}
        if step.evictions is not None:
            for index in step.evictions.deferred.tolist():
                request = step.requests[int(step.evictions.rows[index])]
                request.plan = step.evictions.resolved[index]
        step.evictions = step.layout = None
        return evictions, reports

    def idle_step(self, num_reqs: int) -> Step:
        """Begin a step without real requests: profiling, warm-up or graph capture."""
        self.step = Step.nothing(self.num_layers, num_reqs)
        for hooks in self.hooks.end_step:
            hooks.end_step(self.step)
        return self.step
