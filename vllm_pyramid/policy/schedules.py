# SPDX-License-Identifier: Apache-2.0
"""Schedules: when a request evicts, and how much it keeps at evictions during generation.

    computed tokens   0 ........ n ........ n + i ........ n + 2 i ...
    eviction                     1          2              3             (i = `interval`)

Points and lengths are pure functions of the prompt's plan and the number of computed tokens, so the
scheduler and every worker agree without a message, and a preempted request evicts at the same
points when it is computed again. With `interval` and `prompt: keep` the prompt stays whole and in
its blocks, which other requests may share, and the budget bounds what is generated. With `pressure`
nothing is evicted until the pool lacks blocks; the scheduler then orders evictions
(`scheduler/pressure.py`), which the workers carry out before a step (`worker/late_evictions.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from vllm_pyramid.plan import Budget, EvictionPoint, IntArray
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy


class Schedule(Component):
    """Base class: evict at the prompt's end, and then after every `every` tokens.

    A subclass may set the lengths of each layer (`keep`) and protect tokens from later evictions
    (`front`, `recent`). The worker checks that a layer holds as many tokens as it should keep.
    `waits_for_orders`: a prompt is evicted only when the scheduler orders it.
    """

    section: ClassVar[str] = "schedule"
    waits_for_orders: ClassVar[bool] = False

    @property
    def every(self) -> int:
        """Tokens between two evictions; 0 if the prompt's end is the only one."""
        return 0

    @property
    def keeps_prompts(self) -> bool:
        """Whether prompts stay whole: the budget is the answer's, and scorers see that alone."""
        return False

    @property
    def budgets_above(self) -> tuple[Budget, ...]:
        """The budgets of orders above the policy's own, from the most tokens to the fewest."""
        return ()

    @property
    def counts_budgets(self) -> float:
        """How many times its budget a request counts where admission asks whether all fit."""
        return 1.0

    @property
    def levels_every(self) -> int:
        """Generated tokens after which orders may evict them, too; 0: they evict prompts alone."""
        return 0

    @property
    def works_in_every_step(self) -> bool:
        """Whether decode steps may end at an eviction."""
        return self.every > 0

    @property
    def unsupported(self) -> Unsupported:
        if not self.every:
            return {}
        if self.keeps_prompts:
            return {Feature.KV_TURNS: "it keeps prompts whole, so no turn's end is evicted from"}
        why = "it also evicts generated tokens"
        return {
            Feature.KV_TURNS: why,
            Feature.KV_KEEP: f"{why}, and what a layer keeps of the prompt changes",
        }

    def keep(self, prompt: EvictionPoint, computed: int, usual: EvictionPoint) -> IntArray:
        """Return the tokens that each layer keeps per KV head at a later eviction: `[L]`.

        `prompt` is the eviction at the prompt's end, `usual` what the allocator keeps of a prompt
        of `computed` tokens with the same budget.
        """
        return usual.keep

    def front(self, prompt: EvictionPoint, computed: int) -> IntArray:
        """Return how many of a layer's first tokens stay whatever their scores: `[L]`."""
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

    With `prompt: keep` the prompt is held beside the budget: it stays exact, in blocks that other
    requests share as without a policy. Tokens are then those of the whole cache until the first
    eviction at which more than the budget has been generated.

    Attributes:
        interval: tokens between two evictions; less than a block frees no memory at most of them.
        prompt: `evict`: the budget is one of prompt and answer together; `keep`: of the answer.
    """

    kind: Literal["interval"] = "interval"
    interval: int = Field(default=64, ge=1)
    prompt: Literal["evict", "keep"] = "evict"

    @property
    def every(self) -> int:
        return self.interval

    @property
    def keeps_prompts(self) -> bool:
        return self.prompt == "keep"

    def check(self, policy: Policy) -> None:
        if not self.keeps_prompts:
            return
        why = f"policy {policy.name!r} keeps prompts in their blocks (schedule.prompt: keep), "
        if not policy.fill_blocks:
            raise ValueError(f"{why}and fill_blocks: false moves tokens by less than a block")
        if policy.sinks:
            raise ValueError(f"{why}and sinks are first tokens of a prompt: leave sinks out")
        for part in policy.parts:
            if part is not self and not part.leaves_fronts:
                raise ValueError(
                    f"{why}and `{part.section}: {part.kind}` was not tried beside that: leave one "
                    "of them out"
                )

    def check_budget(self, policy: Policy, budget: Budget) -> None:
        """Refuse a share: the prompt, of which it would be one, stays."""
        if self.keeps_prompts and budget.tokens is None:
            raise ValueError(
                f"policy {policy.name!r} keeps prompts whole (schedule.prompt: keep), and a budget "
                f"of {budget} is a share of the prompt: give the number of generated tokens to keep"
            )


# Two more levels follow, and a byte counts how many of all a token survives.
MAX_LEVELS = 2**8 - 3

# Where generated tokens get levels.
_WITH_ANSWERS: Unsupported = {
    Feature.DRAFTS: "with `answers`, queries of rejected drafts would be among those that score",
    Feature.PIPELINE: "with `answers`, the last stage alone reports scores that fail there",
    Feature.INNER_SPANS: "with `answers`, their tokens are not known again behind an eviction",
}


class PressureSchedule(Schedule):
    """Evict only when the pool lacks blocks, as little as is needed.

    At the prompt's end every token gets a level, from the scores that the other schedules evict by.
    When blocks are missing, the scheduler orders requests to a level: those that lose the smallest
    share of their scores for each block. A request keeps the policy's budget at least. Tokens of an
    answer are evicted only with `answers`.

    Attributes:
        levels: budgets above the policy's own, as shares of the prompt.
        headroom: prompts start while all requests fit at this many times their budgets, which is
            one more level. Requests fall below it where blocks are missing all the same.
        answers: generated tokens after which all tokens of a request get levels again, scored by
            the last queries; budgets are then of the tokens so far. 0: answers are not evicted.
    """

    kind: Literal["pressure"] = "pressure"
    levels: tuple[str, ...] = Field(default=("50%", "25%"), max_length=MAX_LEVELS)
    headroom: float = Field(default=1.5, ge=1.0, le=100.0)
    answers: int = Field(default=0, ge=0)

    waits_for_orders: ClassVar[bool] = True

    @field_validator("levels")
    @classmethod
    def _parsed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        shares = [Budget.parse(one).percent for one in value]
        known = [share for share in shares if share is not None]
        if len(known) < len(shares) or known != sorted(set(known), reverse=True):
            raise ValueError("levels are shares of the prompt that fall, such as 50% and 25%")
        return value

    @property
    def counts_budgets(self) -> float:
        return self.headroom

    @property
    def levels_every(self) -> int:
        return self.answers

    @property
    def works_during_prompt(self) -> bool:
        """Whether layers keep queries; the steps that do run without graphs (`AnswerLevels`)."""
        return self.answers > 0

    @property
    def begins_evicted(self) -> bool:
        return not self.answers

    @property
    def budgets_above(self) -> tuple[Budget, ...]:
        return tuple(Budget.parse(one) for one in self.levels)

    @property
    def unsupported(self) -> Unsupported:
        return {
            Feature.KV_TURNS: "it evicts when blocks are missing, not where a turn ends",
            Feature.TRACE: "what a request keeps is not known at its prompt's end",
            **(_WITH_ANSWERS if self.answers else {}),
        }

    def check(self, policy: Policy) -> None:
        if not policy.evicts:
            raise ValueError(
                f"policy {policy.name!r} keeps every token, so the schedule pressure (--kv-evict "
                "pressure) has no effect: choose a policy that evicts"
            )
        for part in policy.parts:
            if part is not self and not part.works_with_orders:
                raise ValueError(
                    f"policy {policy.name!r} cannot evict under pressure (--kv-evict pressure): "
                    f"`{part.section}: {part.kind}` cannot evict later than it scores; choose "
                    "auto, snapkv or pyramidkv, or leave the flag out"
                )
        if not self.answers:
            return
        reason = None
        if policy.scorer.needs_positions:
            reason = f"`scorer: {policy.scorer.kind}` needs positions, which survivors do not have"
        elif not policy.fill_blocks:
            reason = "without fill_blocks survivors begin inside a block, and whole ones are scored"
        elif self.answers < (least := max(policy.window, 1)):
            reason = f"{self.answers} is less than the window of {least} tokens that stay"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} cannot evict answers (schedule.answers): {reason}; set "
                "another number, or 0 to evict prompts alone"
            )
