# SPDX-License-Identifier: Apache-2.0
"""Order evictions when blocks are missing (`PressureSchedule`).

    a prompt ends     the worker reports what each level would lose, here and    on_step_report
                      where an answer gets levels
    a step ends       the next steps lack blocks: requests are ordered to levels orders
    the next report   the worker has evicted: the blocks go back                 on_eviction

Blocks come back one report after the order, so the orders of a step are for what the running
requests need until then, and for the first waiting request that was admitted and found no room.

A request loses a share of its scores at each level. Orders take the smallest share for a block
first, over all requests; of equal ones that of the oldest request. A request whose survivors would
go to blocks that others share is left alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_pyramid.compat.side_channel import LEVELS
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.orders import OrderedBlocks
from vllm_pyramid.kv_cache.request_record import SchedulerRequest
from vllm_pyramid.plan import (
    EvictionPoint,
    LateEviction,
    LevelPlan,
    Order,
    Plan,
    RetentionPlan,
)
from vllm_pyramid.step.hooks import SchedulerHooks

Numbers = npt.NDArray[np.int64]

# Of the pool: what orders free beyond what is missing, so that not every step orders some.
SPARE = 1 / 64


@dataclass(slots=True)
class _Levelled:
    """A running request whose tokens have levels.

    Attributes:
        record: its progress; it has another one after a preemption, and then no levels yet.
        point: the tokens up to which it has levels.
        levels: what each of them keeps. losses: the share of its scores that each loses.
        orders: those that it has been given, one after another.
        generated: how many tokens it had generated at each of these orders.
        lost: the share of its scores that the last one lost.
        pending: `[stages]` blocks that the last order frees once it is reported; None: none do.
    """

    record: SchedulerRequest
    point: int = 0
    levels: Sequence[EvictionPoint] = ()
    losses: Sequence[float] = ()
    orders: list[Order] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    lost: float = 0.0
    pending: Numbers | None = None

    @property
    def plan(self) -> LevelPlan:
        """The plan that it came with."""
        plan = self.record.terms.plan
        assert isinstance(plan, LevelPlan)
        return plan

    @property
    def now(self) -> int:
        """The level that it has been ordered to, of those that it has; -1: none."""
        return self.orders[-1][1] if self.orders and self.orders[-1][0] == self.point else -1

    def ordered(self) -> RetentionPlan:
        """Return the plan of its orders."""
        return self.plan.ordered(self.orders)

    def may_evict(self, request: Request) -> bool:
        """Return whether its levels are those that the worker has when an order comes there.

        Not before its prompt is processed, nor while a step is under way in which it gets others.
        """
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        if processed < request.num_prompt_tokens or self.pending is not None:
            return False
        by = self.plan.point_by
        return by(processed) == by(request.num_computed_tokens)


class Pressure(SchedulerHooks):
    """What a scheduler knows of levels, and the orders that it gives.

    Args:
        coordinator: the blocks. steps_ahead: steps that are scheduled before the blocks of an order
            come back. tokens_per_step: of a request that generates, at most.

    Attributes:
        blocks: what orders do to blocks.
    """

    name = LEVELS
    starts_anew = True

    def __init__(
        self, coordinator: LockstepCoordinator, *, steps_ahead: int, tokens_per_step: int
    ) -> None:
        self._coordinator, self.blocks = coordinator, OrderedBlocks(coordinator)
        self._ahead = steps_ahead * tokens_per_step
        stages = coordinator.layer_blocks.stages
        self._spare = int(SPARE * coordinator.block_pool.num_gpu_blocks)
        self._pending: Numbers = np.zeros(len(stages), np.int64)
        self._requests: dict[str, _Levelled] = {}
        units = cdiv(tokens_per_step, coordinator.layer_blocks.unit)
        self._of_step = max(coordinator.layer_blocks.missing(0, units))
        self._calm = 0  # steps that cannot lack blocks, unless a request starts
        self._orders, self._to_floor, self._lost = 0, 0, 0.0

    @property
    def is_pending(self) -> bool:
        """Whether blocks will come back that orders free."""
        if self._pending.any():
            self._drop_preempted()
        return bool(self._pending.any())

    # Orders ---------------------------------------------------------------------------------------

    def orders(
        self, running: Sequence[Request], admitted: Request | None, scheduled: Container[str]
    ) -> dict[str, LateEviction] | None:
        """Return the evictions that the workers make before the step just scheduled.

        Args:
            running: all running requests, oldest first. Those with tokens may be ordered.
            admitted: the last request that was to start in this step, if there is one.
            scheduled: the requests that got tokens.
        """
        if admitted is None and self._calm:
            self._calm -= 1
            return None  # nearly every step
        self._drop_preempted()
        pool = self._coordinator.block_pool
        free = pool.free_by_stage()
        lacking, to_start = self._growth(running) - free - self._pending, 0
        if admitted is not None and admitted.request_id not in scheduled:
            needed = self._coordinator.get_num_blocks_to_allocate(
                admitted.request_id, admitted.num_tokens, apply_admission_cap=True
            )
            to_start = max(needed - pool.get_num_free_blocks() + int(free.min()), 0)
        if (lacking + to_start <= 0).all():
            # What a step takes at most for each request that generates.
            self._calm = int(-lacking.max()) // (len(running) * self._of_step + 1)
            return None
        # vLLM tells a report of before a preemption by the tokens of its step alone.
        with_tokens = [request for request in running if request.request_id in scheduled]
        chosen, is_enough = self._choose(with_tokens, lacking + to_start)
        if not is_enough and to_start:  # it would wait all the same
            chosen, _ = self._choose(with_tokens, lacking)
        return {
            request.request_id: self._order(request, level, freed)
            for request, level, freed in chosen
        } or None

    def _growth(self, running: Sequence[Request]) -> Numbers:
        """Count the blocks that running requests need before those of an order are back."""
        layer_blocks, records = self._coordinator.layer_blocks, self._coordinator.plans.records
        stock_groups = self._coordinator.stock_groups
        found = np.zeros(len(layer_blocks.stages), np.int64)
        for request in running:
            end = request.num_prompt_tokens + request.max_tokens
            tokens = max(request.num_computed_tokens, request.num_tokens) + self._ahead
            have, need = (
                records[request.request_id].num_blocks,
                cdiv(min(tokens, end), layer_blocks.unit),
            )
            if need > have:
                found += layer_blocks.missing(have, need)
                if stock_groups:
                    found += stock_groups.missing_blocks(request.request_id, tokens)
        return found

    def _choose(
        self, running: Sequence[Request], lacking: Numbers
    ) -> tuple[list[tuple[Request, int, Numbers]], bool]:
        """Choose what to order.

        Args:
            lacking: `[stages]` blocks that are missing; where some are, more is freed (`SPARE`).

        Returns:
            Requests, levels, and the blocks that each frees, `[stages]`; and whether no more are
            missing then.
        """
        if (lacking <= 0).all():
            return [], True
        chosen: dict[str, tuple[Request, int, Numbers]] = {}
        stages = self._coordinator.layer_blocks.stages
        steps: list[tuple[float, int, int, int]] = []  # cost, age, from and to level
        freed: dict[tuple[int, int], Numbers] = {}
        for age, request in enumerate(running):
            levelled = self._requests.get(request.request_id)
            if levelled is None or not levelled.may_evict(request):
                continue
            now = levelled.now
            freed[age, now] = np.zeros(len(stages), np.int64)
            for level in range(now + 1, len(levelled.levels)):
                blocks = self.blocks.freed_by(request.request_id, levelled.levels[level])
                if blocks is not None and (blocks >= 0).all():
                    freed[age, level] = stages.sums(blocks)
            self._add_steps(steps, levelled, freed, age, now)
        while steps and (lacking + self._spare > 0).any():
            _, age, before, level = heapq.heappop(steps)
            request = running[age]
            levelled = self._requests[request.request_id]
            last = chosen.get(request.request_id)
            now = last[1] if last else levelled.now
            if before != now:
                continue  # it has gone further
            lacking = lacking - (freed[age, level] - freed[age, now])
            chosen[request.request_id] = request, level, freed[age, level]
            self._add_steps(steps, levelled, freed, age, level)
        return list(chosen.values()), bool((lacking <= 0).all())

    @staticmethod
    def _add_steps(
        steps: list[tuple[float, int, int, int]],
        levelled: _Levelled,
        freed: dict[tuple[int, int], Numbers],
        age: int,
        now: int,
    ) -> None:
        """Add what a request could do next: to each level below `now`, at its price for a block."""
        lost = levelled.losses[now] if now >= 0 else 0.0
        for level in range(now + 1, len(levelled.losses)):
            blocks = freed.get((age, level))
            if blocks is None or not (more := int((blocks - freed[age, now]).sum())):
                continue
            price = max(levelled.losses[level] - lost, 0.0) / more
            heapq.heappush(steps, (price, age, now, level))

    def _order(self, request: Request, level: int, freed: Numbers) -> LateEviction:
        levelled = self._requests[request.request_id]
        before = levelled.losses[levelled.now] if levelled.now >= 0 else 0.0
        self._lost += levelled.losses[level] - before
        levelled.orders.append((levelled.point, level))
        levelled.lost = levelled.losses[level]
        levelled.generated.append(request.num_output_tokens)
        levelled.pending = freed
        self._pending += freed
        self._orders += 1
        self._to_floor += level + 1 == len(levelled.losses)
        blocks = self.blocks.order(request.request_id, levelled.ordered())
        return LateEviction(tuple(levelled.orders), blocks)

    # Reports --------------------------------------------------------------------------------------

    def on_step_report(self, report: Any, is_alive: Callable[[str], bool]) -> None:
        """Take the losses of requests that have got levels."""
        records = self._coordinator.plans.records
        for request_id, (point, losses) in report.items():
            record = records.get(request_id)
            if record is None or not is_alive(request_id) or not record.num_blocks:
                continue
            if not isinstance(record.terms.plan, LevelPlan):
                continue
            levelled = self._requests.get(request_id)
            if levelled is None or levelled.record is not record:
                self._drop(request_id)
                levelled = self._requests[request_id] = _Levelled(record)
            skip = levelled.ordered().end.skip if levelled.orders else None
            levelled.point, levelled.losses = point, losses
            levelled.levels = levelled.plan.levels_at(point, skip)
            assert len(losses) == len(levelled.levels), (losses, len(levelled.levels))

    def on_eviction(self, request_id: str, plan: Plan, resolved: RetentionPlan) -> None:
        """Take note that an order was carried out; its blocks go back now."""
        levelled = self._requests.get(request_id)
        if levelled is not None and levelled.pending is not None:
            self._pending -= levelled.pending
            levelled.pending = None

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Return when the request was evicted, and to how many tokens: nothing if it never was."""
        levelled = self._drop(request_id)
        if levelled is None:
            return {"kv_evict": "pressure", "evicted_after": [], "evicted_to": []}
        points = levelled.ordered().points if levelled.orders else ()
        return {
            "kv_evict": "pressure",
            "evicted_after": levelled.generated,
            "evicted_to": [point.budget_tokens for point in points],
            **({"lost_share": round(levelled.lost, 4)} if points else {}),
        }

    def totals(self) -> dict[str, Any]:
        return {
            "ordered_evictions": self._orders,
            "ordered_to_floor": self._to_floor,
            "ordered_loss": self._lost,
        }

    def _drop(self, request_id: str) -> _Levelled | None:
        levelled = self._requests.pop(request_id, None)
        if levelled is not None and levelled.pending is not None:
            self._pending -= levelled.pending
        return levelled

    def _drop_preempted(self) -> None:
        records = self._coordinator.plans.records
        gone = [
            request_id
            for request_id, levelled in self._requests.items()
            if records.get(request_id) is not levelled.record
        ]
        for request_id in gone:
            self._drop(request_id)
