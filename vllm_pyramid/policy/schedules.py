# SPDX-License-Identifier: Apache-2.0
"""Schedules: when does a request evict, and how much is kept at evictions during generation?

    computed tokens   0 ........ n ........ n + i ........ n + 2 i ...
    eviction                     1          2              3             (i = `interval`)

Eviction number 1 is the prompt's end. The others follow every `interval` tokens, or never. Both the
point and the lengths are pure functions of the prompt's plan and of how many tokens have been
computed, so the scheduler and every worker agree without a message, and a request that was
preempted evicts at the same points when it is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from vllm_pyramid.plan import EvictionPoint, IntArray
from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy


class Schedule(Component):
    """Base of all schedules: evictions at the prompt's end, and then every `every` tokens.

    A subclass may keep other lengths in each layer (`keep`) and protect tokens from later evictions
    (`front`): what is asked for is checked against what a layer has at that point.
    """

    section: ClassVar[str] = "schedule"

    @property
    def every(self) -> int:
        """Tokens between two evictions; 0 where the prompt's end is the only one."""
        return 0

    @property
    def works_in_every_step(self) -> bool:
        """See the base: a step may end at an eviction."""
        return self.every > 0

    def not_resumable(self, policy: Policy) -> str | None:
        """See the base."""
        if self.every:
            return f"the schedule {self.kind!r} evicts what is generated, too"
        return super().not_resumable(policy)

    def keep(self, prompt: EvictionPoint, computed: int, usual: EvictionPoint) -> IntArray:
        """Tokens that each layer keeps at a later eviction: `[L]`, for each KV head.

        Args:
            prompt: what was kept at the prompt's end. computed: tokens computed by now.
            usual: what the allocator keeps of a prompt of `computed` tokens with this prompt's
                budget.
        """
        return usual.keep

    def front(self, prompt: EvictionPoint, computed: int) -> IntArray:
        """How many of the first tokens that a layer holds stay whatever their score: `[L]`.

        Survivors stand in ascending order, so the tokens that an earlier eviction kept come first.
        """
        return np.zeros_like(prompt.keep)

    def recent(self, prompt: EvictionPoint, computed: int) -> int:
        """How many of the last tokens stay whatever their score, by this schedule alone."""
        return 0


class PromptEndSchedule(Schedule):
    """Once, when the prompt has been processed. What is generated stays."""

    kind: Literal["prompt_end"] = "prompt_end"


class IntervalSchedule(Schedule):
    """At the prompt's end and after every `interval` further tokens, back to the budget.

    So a layer never holds more than its budget, `interval` tokens and a block. A prompt that is
    shorter than the budget loses nothing until it has outgrown it.

    Attributes:
        interval: tokens between two evictions; less than a block frees no memory at most of them.
    """

    kind: Literal["interval"] = "interval"
    interval: int = Field(default=64, ge=1)

    @property
    def every(self) -> int:
        return self.interval
