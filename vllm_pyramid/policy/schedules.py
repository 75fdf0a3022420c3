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

import math
from functools import lru_cache, partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vllm_pyramid.policy.component import Component, parse_component
from vllm_pyramid.policy.plans import IntArray, RetentionPlan


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

    def keep(self, prompt: RetentionPlan, computed: int, thinned: RetentionPlan) -> IntArray:
        """Tokens that each layer keeps at a later eviction: `[L]`, for each KV head.

        Args:
            prompt: what was kept at the prompt's end. computed: tokens computed by now.
            thinned: what the allocator keeps of a prompt of `computed` tokens with this prompt's
                budget.
        """
        return thinned.keep

    def front(self, prompt: RetentionPlan, computed: int) -> IntArray:
        """How many of the first tokens that a layer holds stay whatever their score: `[L]`.

        Survivors stand in ascending order, so the tokens that an earlier eviction kept come first.
        """
        return np.zeros_like(prompt.keep)

    def recent(self, prompt: RetentionPlan, computed: int) -> int:
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


class ThinGeneratedSchedule(Schedule):
    """Generated tokens that left a sliding recent window are thinned (PyramidInfer, section 4).

        held    [ the prompt's | kept of groups that left | recent: `gen_window` ]
        leaves                                 [ group ]      every `gen_interval` tokens

    Of all the generated tokens that have left the window, layer l of m keeps the share
    `gen_compress_ratio * r(l)`, `r(l) = d + (1 - d) * (cos(pi * l / m) + 1) / 2` with
    d = `gen_decay_ratio`, rounded down. What the prompt left is not touched. Goes with the scorer
    `recent_ensemble`.

    Attributes:
        gen_window: generated tokens that are recent, a multiple of `gen_interval`: the queries of
            the window are then exactly those that came after the group which leaves it.
        gen_interval: tokens of a group, the authors' exceed_length_to_compress.
        gen_compress_ratio: the share that the lowest layer keeps.
        gen_decay_ratio: towards which part of it the shares fall with depth.
    """

    kind: Literal["thin_generated"] = "thin_generated"
    gen_window: int = Field(default=64, ge=1)
    gen_interval: int = Field(default=16, ge=1)
    gen_compress_ratio: float = Field(default=0.9, ge=0, le=1)
    gen_decay_ratio: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _whole_groups(self) -> ThinGeneratedSchedule:
        if self.gen_window % self.gen_interval:
            raise ValueError(
                f"gen_window {self.gen_window} must be a multiple of gen_interval "
                f"{self.gen_interval}: generated tokens leave the window in groups of that many"
            )
        return self

    @property
    def every(self) -> int:
        return self.gen_interval

    def kept(self, left: int, num_layers: int) -> IntArray:
        """Of `left` generated tokens, all that left the window by then: `[num_layers]`."""
        share = self.gen_decay_ratio
        falls = [(math.cos(math.pi * layer / num_layers) + 1) / 2 for layer in range(num_layers)]
        rates = [self.gen_compress_ratio * (share + (1 - share) * fall) for fall in falls]
        return np.array([int(left * rate) for rate in rates], np.int32)

    def kept_of_group(self, group: int, num_layers: int) -> IntArray:
        """Of group number `group`, 1 the first that leaves the window: `[num_layers]`."""
        return _kept_of_group(self, group, num_layers)

    def keep(self, prompt: RetentionPlan, computed: int, thinned: RetentionPlan) -> IntArray:
        """All that is held of the prompt, what is kept of the groups, the window."""
        recent = self.recent(prompt, computed)
        left = computed - prompt.prompt_len - recent
        return prompt.held + self.kept(left, len(prompt.keep)) + recent

    def front(self, prompt: RetentionPlan, computed: int) -> IntArray:
        return prompt.held

    def recent(self, prompt: RetentionPlan, computed: int) -> int:
        return min(self.gen_window, computed - prompt.prompt_len)


@lru_cache(maxsize=4096)  # every layer asks for its number of the same groups
def _kept_of_group(schedule: ThinGeneratedSchedule, group: int, num_layers: int) -> IntArray:
    left = group * schedule.gen_interval
    before = left - schedule.gen_interval
    return schedule.kept(left, num_layers) - schedule.kept(before, num_layers)


SCHEDULES: dict[str, type[Schedule]] = {
    "prompt_end": PromptEndSchedule,
    "interval": IntervalSchedule,
    "thin_generated": ThinGeneratedSchedule,
}
parse_schedule = partial(parse_component, Schedule, SCHEDULES)
