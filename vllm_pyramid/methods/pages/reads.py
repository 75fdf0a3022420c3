# SPDX-License-Identifier: Apache-2.0
"""Pages that generated tokens read: counted by the workers, added up by the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_pyramid.step.hooks import SchedulerHooks

NAME = "pages"  # of the hooks on both sides


class StepReads(NamedTuple):
    """What the tokens behind the prompts of a step read; lists of R, summed over the layers.

    A page counts once, whichever of its KV heads read it: all heads read as many.

    Attributes:
        request_ids: R names.
        read: pages in the tables that attention was given.
        visible: pages that attention to everything would have read.
        tokens: tokens of the step that come behind the prompt.
    """

    request_ids: list[str]
    read: list[int]
    visible: list[int]
    tokens: list[int]


@dataclass
class _Sums:
    read: int = 0
    visible: int = 0
    tokens: int = 0


class PageReads(SchedulerHooks):
    """Adds up what was read, for each request and since the start."""

    name = NAME

    def __init__(self) -> None:
        self._requests: dict[str, _Sums] = {}
        self._read = self._visible = 0

    def on_step_report(self, report: StepReads, is_alive: Callable[[str], bool]) -> None:
        """Add a step's report; for requests that have ended, to the totals alone."""
        for name, read, visible, tokens in zip(*report, strict=True):
            self._read += read
            self._visible += visible
            if not is_alive(name):
                continue
            sums = self._requests.setdefault(name, _Sums())
            sums.read += read
            sums.visible += visible
            sums.tokens += tokens

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Forget a request, and return what its tokens behind the prompt read, in all layers.

        `attended_tokens` counts these tokens: those that went through the model, so not the last
        one, and drafts and those computed again after a preemption, too.
        """
        sums = self._requests.pop(request_id, _Sums())
        return {
            "pages_read": sums.read,
            "pages_visible": sums.visible,
            "attended_tokens": sums.tokens,
        }

    def totals(self) -> dict[str, int]:
        """Return the pages since the start."""
        return {"pages_read": self._read, "pages_visible": self._visible}
