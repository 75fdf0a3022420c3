# SPDX-License-Identifier: Apache-2.0
"""Schedules: when a request evicts, and how much it keeps at evictions during generation.

    computed tokens   0 ........ n ........ n + i ........ n + 2 i ...
    eviction                     1          2              3             (i = `interval`)

Eviction 1 is the prompt's end; the others follow every `interval` tokens, or never. Points and
lengths are pure functions of the prompt's plan and the number of computed tokens, so the scheduler
and every worker agree without a message, and a preempted request evicts at the same points when it
is computed again.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from vllm_pyramid.plan import EvictionPoint, IntArray
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component


class Schedule(Component):
    """Base class: evict at the prompt's end, and then after every `every` tokens.

    A subclass may set the lengths of each layer (`keep`) and protect tokens from later evictions
    (`front`, `recent`). The worker checks that a layer holds as many tokens as it should keep.
    """

    section: ClassVar[str] = "schedule"

    @property
    def every(self) -> int:
        """Tokens between two evictions; 0 if the prompt's end is the only one."""
        return 0

    @property
    def works_in_every_step(self) -> bool:
        """Whether decode steps may end at an eviction."""
        return self.every > 0

    @property
    def unsupported(self) -> Unsupported:
        if not self.every:
            return {}
        why = "it also evicts generated tokens"
        return {
            Feature.KV_TURNS: why,
            Feature.KV_KEEP: f"{why}, and what a layer keeps of the prompt changes",
        }

    def keep(self, prompt: EvictionPoint, computed: int, usual: EvictionPoint) -> IntArray:
        """Return the tokens that each layer keeps per KV head at a later eviction: `[L]`.

        Args:
            prompt: the eviction at the prompt's end. computed: tokens computed by now.
            usual: what the allocator keeps of a prompt of `computed` tokens with the same budget.
        """
        return usual.keep

    def front(self, prompt: EvictionPoint, computed: int) -> IntArray:
        """Return how many of a layer's first tokens stay whatever their scores: `[L]`.

        Survivors stand in ascending order, so the tokens that an earlier eviction kept come first.
        """
        return np.zeros_like(prompt.keep)

    def recent(self, prompt: EvictionPoint, computed: int) -> int:
        """Return how many of the last tokens stay whatever their scores, besides the window."""
        return 0


class PromptEndSchedule(Schedule):
    """Evict once, when the prompt has been processed; generated tokens stay."""

    kind: Literal["prompt_end"] = "prompt_end"


class IntervalSchedule(Schedule):
    """Evict to the budget at the prompt's end and after every `interval` further tokens.

    A layer never holds more than its budget, `interval` tokens and a block. A request loses nothing
    until it is longer than its budget.

    Attributes:
        interval: tokens between two evictions; less than a block frees no memory at most of them.
    """

    kind: Literal["interval"] = "interval"
    interval: int = Field(default=64, ge=1)

    @property
    def every(self) -> int:
        return self.interval
