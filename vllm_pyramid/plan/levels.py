# SPDX-License-Identifier: Apache-2.0
"""The plan of a request that keeps its prompt until the scheduler orders otherwise.

    computed tokens   0 ............ prompt_len .......... an order ............ another
    kept of a prompt  all            all                   levels[i]             levels[j], j > i

An order evicts from the prompt alone, as if it had been evicted to that level at its end. Tokens
generated since then stay where they are. Survivors of a level are among those of each level before
it, so an order needs no scores but those of the prompt's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from vllm_pyramid.plan.eviction_point import EvictionPoint
from vllm_pyramid.plan.retention import RetentionPlan


class LateEviction(NamedTuple):
    """An order to the workers: what a request is evicted to before a step.

    Attributes:
        levels: of its plan, all that it has been ordered to; the last one is new.
        blocks: `[layers][blocks]` ids of the blocks that hold what is left of its prompt.
    """

    levels: tuple[int, ...]
    blocks: list[list[int]]


@dataclass(frozen=True, eq=False)
class LevelPlan(RetentionPlan):
    """A plan whose only point is the prompt's end, where nothing is given back.

    Attributes:
        levels: what an order may keep of the prompt, from the most tokens to the fewest; each is a
            point at the prompt's end.
    """

    levels: tuple[EvictionPoint, ...] = ()
    waits_for_orders: ClassVar[Literal[True]] = True

    @classmethod
    def of(cls, whole: EvictionPoint, levels: Sequence[EvictionPoint]) -> RetentionPlan:
        """Build the plan of a prompt.

        A level is left out if it gives nothing back, as much as the one behind it, or if some layer
        keeps less than there.

        Args:
            whole: the prompt's end, with all tokens kept.
            levels: from the most tokens to the fewest; the last one is the floor.

        Returns:
            The floor's plan if it gives nothing back: the request then never evicts.
        """
        *above, floor = levels
        if not floor.skip.any():
            return RetentionPlan((floor,))
        found = [floor]
        for level in reversed(above):
            fewer = level.skip < found[-1].skip
            if level.skip.any() and fewer.any() and (level.skip <= found[-1].skip).all():
                found.append(level)
        return cls((whole,), levels=tuple(reversed(found)))

    @cached_property
    def evicts(self) -> bool:
        return True

    @cached_property
    def untouched(self) -> None:
        """None: no eviction writes to a slot before it is ordered, and then what is shared there is
        given up first (`PrefixStore.claim`)."""
        return None

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(level.num_bytes for level in self.levels)

    def estimate(self) -> RetentionPlan:
        """Return the plan that keeps the least: what the request can be reduced to."""
        return RetentionPlan((self.levels[-1],))

    def ordered(self, levels: Sequence[int]) -> RetentionPlan:
        """Return the plan of a request that has been ordered to these levels, one after another."""
        return RetentionPlan(tuple(self.levels[level] for level in levels))
