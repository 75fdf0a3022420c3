# SPDX-License-Identifier: Apache-2.0
"""Order evictions when blocks are missing (`PressureSchedule`).

    a prompt ends     it gets levels if the workers have memory for them, here   without_levels
                      and where an answer gets levels
    its report        the worker says what each level would lose                 on_step_report
    a step ends       the next steps lack blocks: requests are ordered to levels orders
    the next report   the worker has evicted: the blocks go back                 on_eviction

Blocks come back one report after the order, so the orders of a step are for what the running
requests need until then, and for the first waiting request that was admitted and found no room.

A request loses a share of its scores at each level. Orders take the smallest share for a block
first, over all requests; of equal ones that of the oldest request. A request whose survivors would
go to blocks that others share is left alone.

The workers have memory for the levels of as many tokens as the pool has. Requests that share blocks
may have more tokens together: one for whose levels no memory is left gets none.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.compat.side_channel import LEVELS
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.orders import OrderedBlocks
from vllm_pyramid.plan import LateEviction, LevelPlan, Plan, RetentionPlan
from vllm_pyramid.scheduler.levelled import Levelled, Numbers
from vllm_pyramid.step.hooks import SchedulerHooks

# Of the pool: what orders free beyond what is missing, so that not every step orders some.
SPARE = 1 / 64


class Pressure(SchedulerHooks):
    """What a scheduler knows of levels, and the orders that it gives.

    Args:
        levels: the schedule's, by name.
        steps_ahead: steps that are scheduled before the blocks of an order come back.
        tokens_per_step: of a request that generates, at most.
        watermark: blocks that vLLM leaves free where a request starts beside others.
        levels_per_token: see `policy/planning.py`.
    """

    name = LEVELS
    starts_anew = True

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        levels: Sequence[str],
        *,
        steps_ahead: int,
        tokens_per_step: int,
        watermark: int,
        levels_per_token: int,
    ) -> None:
        self._names = ("whole", *levels, "headroom", "lowest")
        self._coordinator, self.blocks = coordinator, OrderedBlocks(coordinator)
        self._ahead, self._tokens_per_step = steps_ahead * tokens_per_step, tokens_per_step
        stages = coordinator.layer_blocks.stages
        self._watermark = watermark
        block_size = int(coordinator.layer_blocks.block_sizes.min())
        pool_tokens = coordinator.block_pool.num_gpu_blocks * block_size // max(stages.sizes)
        self._most_marked = levels_per_token * pool_tokens
        self._spare = int(SPARE * coordinator.block_pool.num_gpu_blocks)
        self._pending: Numbers = np.zeros(len(stages), np.int64)
        self._requests: dict[str, Levelled] = {}
        units = cdiv(tokens_per_step, coordinator.layer_blocks.unit)
        self._of_step = max(coordinator.layer_blocks.missing(0, units))
        self._of_step += coordinator.stock_groups.missing_blocks("", tokens_per_step)
        self._calm = 0  # steps that cannot lack blocks, unless a request starts
        self._orders, self._to_floor, self._lost, self._avoided = 0, 0, 0.0, 0
        self._by_level: dict[str, int] | None = None  # requests; None: to be counted anew

    @property
    def is_pending(self) -> bool:
        """Whether blocks will come back that orders free."""
        if self._pending.any():
            self._drop_preempted()
        return bool(self._pending.any())

    # Orders ---------------------------------------------------------------------------------------

    def orders(
        self, running: Sequence[Request], admitted: Request | None, scheduled: Mapping[str, int]
    ) -> dict[str, LateEviction] | None:
        """Return the evictions that the workers make before the step just scheduled.

        Args:
            running: oldest first; those with tokens in `scheduled` may be ordered.
            scheduled: tokens of the step, by request.
            admitted: the last request that was to start in this step, or to load its state, if
                there is one.
        """
        if admitted is None and self._calm:
            self._calm -= 1
            return None  # nearly every step
        self._drop_preempted()
        pool = self._coordinator.block_pool
        free = pool.free_by_stage()
        lacking, to_start = self._growth(running) - free - self._pending, 0
        loads = RequestStatus.WAITING_FOR_REMOTE_KVS  # it has its blocks
        if (
            admitted is not None
            and admitted.request_id not in scheduled
            and admitted.status != loads
        ):
            needed = self._coordinator.get_num_blocks_to_allocate(
                admitted.request_id, admitted.num_tokens, apply_admission_cap=True
            )
            needed += self._watermark if scheduled else 0
            to_start = max(needed - pool.get_num_free_blocks() + int(free.min()), 0)
        if (lacking + to_start <= 0).all():
            # What a step takes at most for each request that generates.
            self._calm = int(-lacking.max()) // (len(running) * self._of_step + 1)
            return None
        # vLLM tells a report of before a preemption by the tokens of its step alone.
        with_tokens = [request for request in running if request.request_id in scheduled]
        chosen, is_enough = self._choose(with_tokens, lacking + to_start)
        if not is_enough and to_start:  # it would wait all the same
            chosen, is_enough = self._choose(with_tokens, lacking)
        self._avoided += is_enough and bool((lacking > 0).any())
        return {
            request.request_id: self._order(request, level, freed, scheduled[request.request_id])
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
        """Choose requests, levels and `[stages]` blocks that each frees; and whether they suffice.

        `lacking` are the `[stages]` missing blocks; where some are, more is freed (`SPARE`).
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
        levelled: Levelled,
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

    def _order(self, request: Request, level: int, freed: Numbers, scheduled: int) -> LateEviction:
        levelled = self._requests[request.request_id]
        before = levelled.losses[levelled.now] if levelled.now >= 0 else 0.0
        levelled.lost = levelled.losses[level] - before
        levelled.orders.append((levelled.point, level))
        levelled.level = levelled.plan.number_of(levelled.orders[-1])
        levelled.pending, self._by_level = freed, None
        self._pending += freed
        plan = levelled.ordered()
        levelled.marked = int(plan.end.held.max())
        generated = request.num_output_tokens
        if self._tokens_per_step == 1:  # steps under way sample further ones
            before = request.num_computed_tokens - scheduled
            generated = max(generated, before + 1 - request.num_prompt_tokens)
        levelled.evictions.append((generated, plan.end.budget_tokens, levelled.losses[level]))
        blocks = self.blocks.order(request.request_id, plan)
        return LateEviction(tuple(levelled.orders), blocks)

    # Levels ---------------------------------------------------------------------------------------

    def without_levels(
        self, ending: Iterable[Request], running: Iterable[Request], scheduled: Mapping[str, int]
    ) -> list[str]:
        """Return the requests that get no levels in the step just scheduled, for lack of memory.

        Called behind `orders`, which the workers carry out first.

        Args:
            ending: whose prompts end in the step. running: whose answers may come to a point in it.
            scheduled: tokens of the step, by request.
        """
        due = [(request, request.num_prompt_tokens) for request in ending]
        for request in running:
            levelled, end = self._requests.get(request.request_id), request.num_computed_tokens
            if levelled is None or end <= request.num_prompt_tokens:
                continue
            point = levelled.plan.point_by(end)
            if end - scheduled.get(request.request_id, 0) < point:
                due.append((request, point))
        if not due:
            return []
        self._drop_preempted()
        self._by_level = None
        records, refused = self._coordinator.plans.records, list[str]()
        marked = sum(levelled.marked for levelled in self._requests.values())
        for request, point in due:
            record = records[request.request_id]
            if not isinstance(record.terms.plan, LevelPlan):
                continue
            levelled = self._requests.setdefault(request.request_id, Levelled(record))
            levelled.point = levelled.point or point
            skip = levelled.ordered().end.skip
            if not levelled.plan.levels_at(point, skip):
                continue
            more = point - int(skip.min()) - levelled.marked
            if marked + more > self._most_marked:
                refused.append(request.request_id)
                continue
            marked += more
            levelled.marked += more
        return refused

    # Reports --------------------------------------------------------------------------------------

    def on_step_report(self, report: Any, is_alive: Callable[[str], bool]) -> None:
        """Take the losses of requests that have got levels."""
        self._drop_preempted()
        for request_id, (point, losses) in report.items():
            levelled = self._requests.get(request_id)
            if levelled is None or not is_alive(request_id):
                continue
            levelled.point, levelled.losses = point, losses
            levelled.levels = levelled.plan.levels_at(point, levelled.ordered().end.skip)
            assert len(losses) == len(levelled.levels), (losses, len(levelled.levels))

    def on_eviction(self, request_id: str, plan: Plan, resolved: RetentionPlan) -> None:
        """Take note that an order was carried out; its blocks go back now."""
        if (levelled := self._requests.get(request_id)) is not None:
            self._count(levelled)

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Return when the request was evicted, and to how many tokens: nothing if it never was."""
        self._drop_preempted()  # perhaps this one, whose last token came from a step under way
        levelled, self._by_level = self._requests.pop(request_id, None), None
        own: dict[str, Any] = {}
        if levelled is not None and levelled.pending is not None:
            self._pending -= levelled.pending
            levelled.take_back()  # its last token came from a step before the order's
            own["kv_budget"] = levelled.ordered().budget_tokens
        evictions = levelled.evictions if levelled is not None else []
        if evictions:
            own["lost_share"] = round(evictions[-1][2], 4)
        return {
            "kv_evict": "pressure",
            "evicted_after": [generated for generated, _, _ in evictions],
            "evicted_to": [tokens for _, tokens, _ in evictions],
            **own,
        }

    def totals(self) -> dict[str, Any]:
        if self._by_level is None:
            levels = [one.level for one in self._requests.values() if one.point]
            self._by_level = {
                name: levels.count(level) for level, name in enumerate(self._names, start=-1)
            }
        return {
            "ordered_evictions": self._orders,
            "ordered_to_floor": self._to_floor,
            "ordered_loss": self._lost,
            "avoided_preemptions": self._avoided,
            "requests_by_level": self._by_level,
        }

    def _count(self, levelled: Levelled) -> None:
        """Count the order that a request was under while a step computed a token of it."""
        if levelled.pending is None:
            return
        self._pending -= levelled.pending
        levelled.pending = None
        self._orders += 1
        self._to_floor += levelled.now + 1 == len(levelled.losses)
        self._lost += levelled.lost

    def _drop_preempted(self) -> None:
        """Forget the levels of requests that have been preempted, though not their evictions."""
        records = self._coordinator.plans.records
        for request_id, levelled in list(self._requests.items()):
            if (record := records.get(request_id)) is not levelled.record:
                del self._requests[request_id]
                self._count(levelled)
                self._by_level = None
                if record is not None and levelled.evictions:
                    self._requests[request_id] = Levelled(record, evictions=levelled.evictions)
