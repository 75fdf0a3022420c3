# SPDX-License-Identifier: Apache-2.0
"""Bytes of V between device and host memory: counted by the workers, added up by the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm_pyramid.methods.step_sums import StepSums

NAME = "host_values"  # of the hooks on both sides


class StepTraffic(NamedTuple):
    """What a step moved for each of its R requests, summed over layers and ranks.

    Attributes:
        written: bytes of V of new tokens, written to host memory.
        read: bytes of the rows of V that the step's queries needed (`topn_attention`).
        decoded: tokens of the step that come behind the prompt: they choose their keys.
    """

    request_ids: list[str]
    written: list[int]
    read: list[int]
    decoded: list[int]


class SwapTraffic(StepSums):
    """Adds up what moved; a preempted request has moved its V again, and says so."""

    name = NAME
    numbers = "v_bytes_written", "v_bytes_read", "decoded", "read_decoding"
    # V of a prefix that was cached is neither written nor read again.
    tells_of_others = frozenset(numbers[:2])

    def on_step_report(self, report: Sequence[Any], is_alive: Callable[[str], bool]) -> None:
        """Add a step's `StepTraffic`; what a request reads counts as decoding behind its prompt."""
        _, _, read, decoded = report
        decoding = [count if tokens else 0 for count, tokens in zip(read, decoded, strict=True)]
        super().on_step_report((*report, decoding), is_alive)

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Forget a request, and return what moved for it.

        `v_bytes_read_per_token` is a mean over the tokens behind the prompt that went through the
        model.
        """
        found = super().on_request_finished(request_id)
        decoded, read = found.pop("decoded"), found.pop("read_decoding")
        return found | {"v_bytes_read_per_token": read / decoded if decoded else 0.0}
