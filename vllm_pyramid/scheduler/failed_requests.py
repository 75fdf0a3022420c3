# SPDX-License-Identifier: Apache-2.0
"""Counts and logs what went wrong for single requests, while the engine goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger

from vllm_pyramid.step.limited_log import LimitedLog

logger = init_logger(f"vllm.{__name__}")


class FailedRequests:
    """The failures of a scheduler's requests since its start; `frontend/metrics.py` has the names.

    `ended` counts requests that ended with an error, by kind (`step.failures.KINDS`).
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.dropped_traces = self.dropped_reports = 0
        self._log = LimitedLog(logger.error)

    def add(self, request_id: str, kind: str, reason: str) -> None:
        """Count a request that ends with an error."""
        self.ended[kind] += 1
        self._log(kind, "request %s ends with an error: %s", request_id, reason)

    def drop_report(self, request_id: str, error: Exception) -> dict[str, Any]:
        """Count a report that cannot go out, and return what goes out in its place."""
        with self.dropping(f"the report of what request {request_id} kept"):
            raise error
        return {"report_error": f"{type(error).__name__}: {error}"[:500]}

    @contextmanager
    def dropping(self, what: str) -> Iterator[None]:
        """Count a report whose handling raises inside, and go on without it."""
        try:
            yield
        except Exception as error:
            self.dropped_reports += 1
            self._log("report", "%s is lost: %s: %s", what, type(error).__name__, error)

    def totals(self) -> dict[str, Any]:
        """Return the counters, or nothing while nothing has failed."""
        totals: dict[str, Any] = {}
        if self.ended:
            totals["failed_requests"] = dict(self.ended)
        if self.dropped_traces:
            totals["dropped_traces"] = self.dropped_traces
        if self.dropped_reports:
            totals["dropped_reports"] = self.dropped_reports
        return totals
