# SPDX-License-Identifier: Apache-2.0
"""The contract of a policy.

A policy answers, as a pure function of the prompt's length, how many tokens each layer keeps, or,
where that depends on the prompt's attention, how many all of them together; it names the scorer and
selector that decide which. It never sees requests or blocks, so the scheduler and every worker can
call it on their own and agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializeAsAny,
    model_validator,
)

from vllm_pyramid.policy.allocators import AnyAllocator, UniformAllocator
from vllm_pyramid.policy.budget import Budget
from vllm_pyramid.policy.combination import check_combination
from vllm_pyramid.policy.planning import plan_for
from vllm_pyramid.policy.plans import IntArray, Plan
from vllm_pyramid.policy.schedules import PromptEndSchedule, Schedule, parse_schedule
from vllm_pyramid.policy.scorers import AccumulatingScorer, Scorer, parse_scorer
from vllm_pyramid.policy.selectors import Selector, TopKSelector, parse_selector
from vllm_pyramid.policy.solved import SolvingAllocator, parse_allocator
from vllm_pyramid.policy.thinning import DecayAllocator


class Policy(BaseModel):
    """A method of KV eviction; immutable, hashable, picklable.

    Attributes:
        name: what users call it. description: the idea in one line. paper: title and link.
        budget: mean tokens kept per layer and KV head, window and sinks included.
        window: the prompt's last tokens, kept in every layer; with a scorer that needs attention
            they are the observation window whose queries score the others.
        sinks: the prompt's first tokens, kept in every layer.
        fill_blocks: fill the room that rounding to blocks leaves with the next best tokens (same
            memory) instead of keeping exactly the paper's number.
        schedule: when to evict: at the prompt's end, or during generation too.
        swap_v: keep V of the layers from `device_layers` on in host memory, K alone on the device
            (KCache, arXiv:2404.18057); what is evicted is then decided as without it.
        top_n: with `swap_v`, keys a query head of a generated token takes V of: those with the
            largest attention. Prompts attend to everything, and so does who sees no more keys.
        device_layers: with `swap_v`, the lowest layers, which keep V beside K: the paper's L.
        renormalize: with `swap_v`, make the weights of these keys sum to 1. The paper does not
            (section 3.1): there they are those of the softmax over all keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1)
    description: str
    paper: str
    budget: Annotated[
        InstanceOf[Budget], BeforeValidator(Budget.parse), PlainSerializer(lambda b: b.value)
    ]
    window: int = Field(default=0, ge=0)
    sinks: int = Field(default=0, ge=0)
    fill_blocks: bool = True
    swap_v: bool = False
    top_n: int = Field(default=128, ge=1, lt=2**31)
    device_layers: int = Field(default=1, ge=0)
    renormalize: bool = True
    scorer: Annotated[SerializeAsAny[Scorer], BeforeValidator(parse_scorer)]
    allocator: Annotated[SerializeAsAny[AnyAllocator], BeforeValidator(parse_allocator)] = Field(
        default_factory=UniformAllocator
    )
    selector: Annotated[SerializeAsAny[Selector], BeforeValidator(parse_selector)] = Field(
        default_factory=TopKSelector
    )
    schedule: Annotated[SerializeAsAny[Schedule], BeforeValidator(parse_schedule)] = Field(
        default_factory=PromptEndSchedule
    )

    @model_validator(mode="after")
    def _check(self) -> Policy:
        check_combination(self)
        self.check_budget(self.budget)
        return self

    @cached_property
    def stable_hash(self) -> int:
        """A hash that is equal in every process, unlike that of a string: it travels by pickle."""
        return zlib.crc32(self.model_dump_json().encode())

    def __hash__(self) -> int:
        return self.stable_hash

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Policy:
        """A validated copy with other values; pydantic's own would skip the checks."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})

    @property
    def evicts(self) -> bool:
        """False for a policy that keeps everything, whatever the prompt's length."""
        return self.scorer.evicts

    def swaps_layer(self, layer: int) -> bool:
        """Whether V of this layer, counted from the bottom, lies in host memory."""
        return self.swap_v and layer >= self.device_layers

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if the policy cannot work with a model of so many layers."""
        self.allocator.check_layers(num_layers)
        if self.swap_v and self.device_layers >= num_layers:
            raise ValueError(
                f"policy {self.name!r} keeps V of {self.device_layers} layers on the device, and "
                f"the model has {num_layers}: nothing would be in host memory; lower "
                "`device_layers`"
            )

    def block_sizes(self, num_layers: int, block_size: int) -> IntArray:
        """Tokens of a cache block in each layer, `[num_layers]` int32.

        Args:
            block_size: tokens of a block of K and V. Without V twice as many fit, so that the
                blocks of all layers have one size in bytes and come from one pool.
        """
        swapped = [self.swaps_layer(layer) for layer in range(num_layers)]
        return np.where(swapped, 2 * block_size, block_size).astype(np.int32)

    @property
    def needs_scores(self) -> bool:
        """True if tokens are ranked by attention: the last chunk needs `window` prompt tokens."""
        return self.scorer.needs_attention

    @property
    def solver(self) -> SolvingAllocator | None:
        """The allocator, if it needs the prompt's scores to know the lengths; else None."""
        return self.allocator if isinstance(self.allocator, SolvingAllocator) else None

    @property
    def thinner(self) -> DecayAllocator | None:
        """The allocator, if tokens leave the forward pass between layers; else None."""
        return self.allocator if isinstance(self.allocator, DecayAllocator) else None

    @property
    def gatherer(self) -> AccumulatingScorer | None:
        """The scorer, if what queries give keys is gathered beside the cache; else None."""
        scorer = self.scorer
        if scorer.thins and not self.schedule.every:
            return None
        return scorer if isinstance(scorer, AccumulatingScorer) else None

    @property
    def min_last_chunk(self) -> int:
        """Prompt tokens that the prefill's last chunk must have, where prefill is chunked.

        The scorer needs the whole window's queries at once. Two at least: a chunk of one token
        looks like a decode step, which captured graphs replay without coming by any eviction.
        Policies that work in every step are not served with such graphs.
        """
        if self.needs_every_step:
            return 1
        return max(self.window, 2) if self.needs_scores else 2

    @property
    def needs_every_step(self) -> bool:
        """True if decode steps do more than attention: gather scores, or evict."""
        return self.gatherer is not None or self.schedule.every > 0

    @property
    def min_budget(self) -> int:
        """The smallest budget in tokens: window and sinks, and one token to choose."""
        return self.window + self.sinks + 1

    def check_budget(self, budget: Budget) -> None:
        """Raise ValueError if this policy cannot work with the budget."""
        if not self.evicts and budget.percent != 100:
            raise ValueError(
                f"policy {self.name!r} keeps every token, so a budget of {budget} has no effect: "
                "leave the budget out, or choose a policy that evicts"
            )
        if self.thinner is not None and budget.percent is None:
            raise ValueError(
                f"policy {self.name!r} keeps shares of each piece of a prompt, so its budget, an "
                f"upper limit, is a percentage such as 50%, not {budget} tokens"
            )
        if budget.tokens is not None and budget.tokens < self.min_budget:
            raise ValueError(
                f"budget {budget.tokens} is too small for policy {self.name!r}: it keeps a window "
                f"of {self.window} and {self.sinks} sinks in every layer and needs at least one "
                f"token more; set a budget of at least {self.min_budget}, or a smaller window"
            )

    def plan(
        self, prompt_len: int, num_layers: int, block_size: int, budget: Budget | None = None
    ) -> Plan:
        """How much each layer keeps of a prompt. Pure and cached: equal arguments, same object.

        The mean of `keep` over the layers is exactly `budget_tokens`, for every allocator that
        does not set its own total.

        Args:
            prompt_len: tokens of the prompt. num_layers: attention layers that are evicted from.
            block_size: tokens of a cache block; the largest, where layers differ.
            budget: a request's own instead of the policy's; it must have passed `check_budget`.

        Returns:
            A `RetentionPlan`; of a policy with a `solver` and a prompt that it may shorten, an
            `OpenPlan`, from which the solved lengths make a `RetentionPlan`. The plan of a policy
            with a `thinner` has pieces, and the mean of its `keep` is what the schedule comes to.
            What is kept at evictions after the prompt's end is in `RetentionPlan.after`.

        Raises:
            ValueError: the allocator is made for another number of layers.
        """
        return plan_for(self, prompt_len, num_layers, block_size, budget or self.budget)

    def kept_positions(self, prompt_len: int, keep: int, front: int | None = None) -> IntArray:
        """The positions a policy without attention scores keeps: `[keep]` int32, ascending.

        They are the same for all heads: the first tokens and the most recent ones, or everything.

        Args:
            prompt_len: tokens of the prompt. keep: how many stay, `front <= keep <= prompt_len`
                unless nothing is evicted; pass `RetentionPlan.held` for what is really kept.
            front: how many of them are the first tokens (`RetentionPlan.front`); None: the sinks.
        """
        scored = self.needs_scores or self.scorer.accumulates
        assert not scored, f"{self.name}: positions depend on attention scores"
        assert 0 <= keep <= prompt_len, (keep, prompt_len)
        first = min(self.sinks if front is None else front, keep)
        head = np.arange(first, dtype=np.int32)
        return np.concatenate([head, np.arange(prompt_len - keep + first, prompt_len, dtype="i4")])
