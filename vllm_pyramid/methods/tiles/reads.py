# SPDX-License-Identifier: Apache-2.0
"""Tiles that prompts read: counted by the workers, added up by the scheduler."""

from __future__ import annotations

from typing import NamedTuple

from vllm_pyramid.methods.step_sums import StepSums

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


class TileReads(StepSums):
    """What the sparse part of prompts read.

    Tiles that came from the cache are not counted, and those that were computed again are.
    """

    name = NAME
    numbers = READ, VISIBLE
    tells_of_others = frozenset(numbers)  # tiles that were cached are not computed
