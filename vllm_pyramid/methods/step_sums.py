# SPDX-License-Identifier: Apache-2.0
"""Numbers that workers report of steps, added up by the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from vllm_pyramid.step.hooks import SchedulerHooks


class StepSums(SchedulerHooks):
    """Adds up numbers of requests, for each request and since the start.

    A report has names of requests and a list for each of `numbers`; the first two are counters,
    too.
    """

    numbers: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._requests: dict[str, list[int]] = {}
        self._totals = [0] * len(self.numbers)

    def on_step_report(self, report: Sequence[Any], is_alive: Callable[[str], bool]) -> None:
        for name, *counts in zip(*report, strict=True):
            sums = self._requests.setdefault(name, self._nothing()) if is_alive(name) else []
            for index, count in enumerate(counts):
                self._totals[index] += count
                if sums:
                    sums[index] += count

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        sums = self._requests.pop(request_id, self._nothing())
        return dict(zip(self.numbers, sums, strict=True))

    def totals(self) -> dict[str, int]:
        return dict(zip(self.numbers[:2], self._totals, strict=False))

    def _nothing(self) -> list[int]:
        return [0] * len(self.numbers)
