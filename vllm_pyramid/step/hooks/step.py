# SPDX-License-Identifier: Apache-2.0
"""Hooks of methods that work in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pyramid.step.hooks.worker import WorkerHooks

if TYPE_CHECKING:
    from vllm_pyramid.plan import IntArray
    from vllm_pyramid.step.step import Step, StepLayout, WorkerRequest


@dataclass(frozen=True)
class StepNeeds:
    """What a method asks of a step.

    Attributes:
        wants_log_sum_exp: attention writes its log-sum-exp, on back ends that can.
        layout: the tokens that each layer computes, where layers differ; None: all of the step's.
    """

    wants_log_sum_exp: bool = False
    layout: StepLayout | None = None


class StepHooks(WorkerHooks):
    """The beginning and the end of each step, and the end of each request."""

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: IntArray) -> bool:
        """Return whether a step of these R requests must run without CUDA graphs.

        Called before the step begins, when vLLM chooses its graph. `computed`, `[R]`, are tokens
        computed before the step; behind a prompt the numbers may be any.
        """
        return False

    def begin_step(self, step: Step) -> StepNeeds | None:
        """Prepare a step, whose skips and evictions are known, and return what it needs.

        The step itself is not to be changed. Not called for steps without requests.
        """
        return None

    def end_step(self, step: Step) -> Any | None:
        """Return the report of a step whose layers have all run, as plain data; None: no report.

        The report reaches `SchedulerHooks.on_step_report` of the hooks with the same `name`, before
        what was evicted is reported. A step without requests ends, too, and its report is dropped.
        """
        return None

    def forget(self, request_id: str) -> None:
        """Forget a request, which has finished, was preempted, or comes again with a new plan."""
