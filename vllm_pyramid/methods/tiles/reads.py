# SPDX-License-Identifier: Apache-2.0
"""Tiles that prompts read: counted by the workers, added up by the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_pyramid.step.hooks import SchedulerHooks

NAME = "tiles"  # of the hooks on both sides
READ, VISIBLE = "prefill_tiles_read", "prefill_tiles_visible"


class StepTiles(NamedTuple):
    """What the sparse part of the prompts of a step read, by request; lists of equal length.

    Attributes:
        request_ids: those with tiles in the step.
        read: pairs of a tile of queries and a tile of keys that were computed, summed over KV
            heads and layers, dense ones included.
        visible: those that attention to everything would have computed.
    """

    request_ids: list[str]
    read: list[int]
    visible: list[int]


class TileReads(SchedulerHooks):
    """Adds up what was read, for each request and since the start."""

    name = NAME
    tells_of_others = frozenset({READ, VISIBLE})  # tiles that were cached are not computed

    def __init__(self) -> None:
        self._requests: dict[str, list[int]] = {}
        self._totals = [0, 0]

    def on_step_report(self, report: StepTiles, is_alive: Callable[[str], bool]) -> None:
        """Add a step's report; for requests that have ended, to the totals alone."""
        for name, *counts in zip(*report, strict=True):
            sums = self._requests.setdefault(name, [0, 0]) if is_alive(name) else [0, 0]
            for index, count in enumerate(counts):
                sums[index] += count
                self._totals[index] += count

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        """Forget a request, and return what the sparse part of its prompt read.

        Tiles that came from the cache are not counted, and those that were computed again are.
        """
        return _named(self._requests.pop(request_id, [0, 0]))

    def totals(self) -> dict[str, int]:
        """Return the tiles since the start."""
        return _named(self._totals)


def _named(counts: list[int]) -> dict[str, int]:
    return {READ: counts[0], VISIBLE: counts[1]}
