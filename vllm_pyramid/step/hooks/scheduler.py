# SPDX-License-Identifier: Apache-2.0
"""Hooks of methods that work in the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_pyramid.plan import Plan, RetentionPlan


class SchedulerHooks:
    """What one part of a policy, or a feature of the engine, does in the scheduler.

    Attributes:
        name: of the worker's hooks whose reports come here.
        tells_of_others: what `on_request_finished` returns and depends on earlier requests.
        starts_anew: whether a preemption makes void what was reported of a request.
    """

    name: str = ""
    tells_of_others: frozenset[str] = frozenset()
    starts_anew: bool = False

    def on_request_added(
        self, request_id: str, salt: str, application: str, plan: Plan
    ) -> dict[str, Any] | None:
        """Return fields of an allocator that replaces the policy's for a request just added, or
        None.

        The workers are told. `salt` is the request's `cache_salt`, empty without one; requests
        share only with those of the same salt.
        """
        return None

    def on_step_report(self, report: Any, is_alive: Callable[[str], bool]) -> None:
        """Take what the worker's hooks reported of a step (`StepHooks.end_step`).

        `is_alive`: whether a request has not finished; a report may name some that have. With
        `starts_anew`, whether it has not been preempted since the step, either.
        """

    def on_eviction(self, request_id: str, plan: Plan, resolved: RetentionPlan) -> None:
        """Take note that the worker has evicted from a request, to the lengths of `resolved`.

        `plan` is the request's before the eviction.
        """

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Forget a request, and return what its response says of it."""
        return {}

    def totals(self) -> dict[str, Any]:
        """Return counters since the start, for the metrics."""
        return {}

    def close(self) -> None:
        """Give back what outlives the process: the engine ends."""
