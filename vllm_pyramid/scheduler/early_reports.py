# SPDX-License-Identifier: Apache-2.0
"""Report on requests with stop strings before they end.

The front end finds a stop string and answers at once; the scheduler only learns that the request
was aborted. So the report travels with the first token, and again with each later eviction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.request import Request

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.scheduler.reports import Reports


class EarlyReports:
    """The early reports of one scheduler.

    `waiting` has the requests with stop strings, each with the number of the latest eviction that
    was reported; None before the first report.
    """

    def __init__(self, coordinator: LockstepCoordinator, reports: Reports) -> None:
        self._plans, self._reports = coordinator.plans, reports
        self.waiting: dict[str, int | None] = {}

    def add(self, request: Request) -> None:
        """Report on a new request early, if it has stop strings."""
        params = request.sampling_params
        if params is not None and params.stop:
            self.waiting[request.request_id] = None

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.waiting.pop(request_id, None)

    def attach(self, requests: Mapping[str, Request], outputs: Mapping[int, Any]) -> None:
        """Attach reports to the outputs, by front end, of requests that go on."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                name = output.request_id
                if name not in self.waiting or output.finish_reason is not None:
                    continue
                number = self._plans.confirmed_number(name)
                if number != self.waiting[name]:
                    self.waiting[name] = number
                    request = requests[name]
                    output.kv_transfer_params = self._reports.of_request(request, ended=False)
