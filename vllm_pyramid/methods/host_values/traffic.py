# SPDX-License-Identifier: Apache-2.0
"""Bytes of V between device and host memory: counted by the workers, added up by the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_pyramid.step.hooks import SchedulerHooks

NAME = "host_values"  # of the hooks on both sides


class StepTraffic(NamedTuple):
    """What a step moved for each of its requests; lists of R, summed over layers and ranks.

    Attributes:
        request_ids: R names.
        written: bytes of V of new tokens, written to host memory.
        read: bytes of the rows of V that the step's queries needed (`topn_attention`).
        decoded: tokens of the step that come behind the prompt: they choose their keys.
    """

    request_ids: list[str]
    written: list[int]
    read: list[int]
    decoded: list[int]


@dataclass
class _Moved:
    written: int = 0
    read: int = 0
    read_decoding: int = 0
    decoded: int = 0


class SwapTraffic(SchedulerHooks):
    """Adds up what moved, for each request and since the start."""

    name = NAME
    # V of a prefix that was cached is neither written nor read again.
    tells_of_others = frozenset(("v_bytes_written", "v_bytes_read"))

    def __init__(self) -> None:
        self._requests: dict[str, _Moved] = {}
        self._written = self._read = 0

    def on_step_report(self, report: StepTraffic, is_alive: Callable[[str], bool]) -> None:
        """Add a step's report; for requests that have ended, to the totals alone."""
        for name, written, read, decoded in zip(*report, strict=True):
            self._written += written
            self._read += read
            if not is_alive(name):
                continue
            moved = self._requests.setdefault(name, _Moved())
            moved.written += written
            moved.read += read
            if decoded:
                moved.read_decoding += read
                moved.decoded += decoded

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Forget a request, and return what moved for it.

        `v_bytes_read_per_token` is the mean of the tokens behind the prompt that went through the
        model, or 0. A preempted request has moved its V again, and says so.
        """
        moved = self._requests.pop(request_id, _Moved())
        mean = moved.read_decoding / moved.decoded if moved.decoded else 0.0
        return {
            "v_bytes_written": moved.written,
            "v_bytes_read": moved.read,
            "v_bytes_read_per_token": mean,
        }

    def totals(self) -> dict[str, int]:
        """Return the bytes since the start."""
        return {"v_bytes_written": self._written, "v_bytes_read": self._read}
