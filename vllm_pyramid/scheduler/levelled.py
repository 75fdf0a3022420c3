# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of a request whose tokens have levels (`PressureSchedule`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.cache_store import SchedulerRequest
from vllm_pyramid.plan import EvictionPoint, LevelPlan, Order, RetentionPlan

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)
class Levelled:
    """A running request whose tokens have levels.

    Attributes:
        record: its progress; it has another one after a preemption, and then no levels yet.
        point: the tokens up to which it has levels.
        levels: what each of them keeps. losses: the share of its scores that each loses.
        orders: those that it has been given, one after another.
        evictions: how many tokens it had generated at each order, the mean that a layer kept, and
            the share of the scores that it lost; those before a preemption, too.
        level: of the schedule, to which it has been ordered last; -1: it is whole.
        pending: `[stages]` blocks that the last order frees once it is reported; None: none do.
        lost: the share of the scores that the last order loses, beyond the one before.
        marked: tokens whose levels the workers have in each layer; 0: it has none.
    """

    record: SchedulerRequest
    point: int = 0
    levels: Sequence[EvictionPoint] = ()
    losses: Sequence[float] = ()
    orders: list[Order] = field(default_factory=list)
    evictions: list[tuple[int, int, float]] = field(default_factory=list)
    level: int = -1
    pending: Numbers | None = None
    lost: float = 0.0
    marked: int = 0

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
        """Return the plan of its orders; without any the plan that it came with."""
        return self.plan.ordered(self.orders) if self.orders else self.plan

    def take_back(self) -> None:
        """Forget the last order, which no token of the answer has seen."""
        self.orders.pop()
        self.evictions.pop()

    def may_evict(self, request: Request) -> bool:
        """Return whether the worker has its levels now.

        It has not in the prompt, nor while a step changes them.
        """
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        if processed < request.num_prompt_tokens or self.pending is not None:
            return False
        by = self.plan.point_by
        return by(processed) == by(request.num_computed_tokens)
