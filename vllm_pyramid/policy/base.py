# SPDX-License-Identifier: Apache-2.0
"""The contract of a policy, and the plan it makes for a prompt.

A policy answers, as a pure function of the prompt's length, how many tokens each layer keeps; it
names the scorer and selector that decide which. It never sees requests, blocks or tensors, so the
scheduler and every worker can call it on their own and agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
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

from vllm_pyramid.policy.allocators import Allocator, UniformAllocator, parse_allocator
from vllm_pyramid.policy.budget import Budget
from vllm_pyramid.policy.scorers import Scorer, parse_scorer
from vllm_pyramid.policy.selectors import Selector, TopKSelector, parse_selector

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RetentionPlan:
    """What is kept of one prompt, per layer. All arrays are `[num_layers]` int32 and read-only.

    Attributes:
        prompt_len: tokens of the prompt.
        block_size: tokens of a cache block.
        budget_tokens: the mean of `keep`; at most `prompt_len`.
        keep: tokens the policy keeps per KV head, window and sinks included: the paper's number.
        skip: tokens whose slots are given back: `prompt_len - keep`, rounded down to a block if
            the policy fills blocks. Survivors stand in positions `skip .. prompt_len - 1`.
    """

    prompt_len: int
    block_size: int
    budget_tokens: int
    keep: IntArray
    skip: IntArray

    @cached_property
    def held(self) -> IntArray:
        """Tokens really kept per KV head, `prompt_len - skip`: `keep`, or up to a block more."""
        return _read_only(self.prompt_len - self.skip)

    @cached_property
    def blocks(self) -> IntArray:
        """Blocks each layer holds after the eviction, the prompt's last one included."""
        return _read_only(-(-self.prompt_len // self.block_size) - self.skip // self.block_size)

    @cached_property
    def evicts(self) -> bool:
        """True if any layer gives a slot back."""
        return bool(self.skip.any())


def _read_only(values: npt.NDArray[Any]) -> IntArray:
    result = values.astype(np.int32)
    result.flags.writeable = False
    return result


class Policy(BaseModel):
    """A method of KV eviction at the end of prefill; immutable, hashable, picklable.

    Attributes:
        name: what users call it. description: the idea in one line. paper: title and link.
        budget: mean tokens kept per layer and KV head, window and sinks included.
        window: the prompt's last tokens, kept in every layer; with a scorer that needs attention
            they are the observation window whose queries score the others.
        sinks: the prompt's first tokens, kept in every layer.
        fill_blocks: fill the room that rounding to blocks leaves with the next best tokens (same
            memory) instead of keeping exactly the paper's number.
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
    scorer: Annotated[SerializeAsAny[Scorer], BeforeValidator(parse_scorer)]
    allocator: Annotated[SerializeAsAny[Allocator], BeforeValidator(parse_allocator)] = Field(
        default_factory=UniformAllocator
    )
    selector: Annotated[SerializeAsAny[Selector], BeforeValidator(parse_selector)] = Field(
        default_factory=TopKSelector
    )

    @model_validator(mode="after")
    def _check(self) -> Policy:
        if self.name == "none" or (self.name == "full" and self.evicts):
            raise ValueError(
                f"the name {self.name!r} is reserved (none: plugin off, full: nothing evicted): "
                "give this policy another one"
            )
        if self.needs_scores and self.window < 1:
            raise ValueError(
                f"policy {self.name!r} scores with the queries of the observation window, so "
                f"`window` must be at least 1, not {self.window}"
            )
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

    @property
    def needs_scores(self) -> bool:
        """True if tokens are ranked by attention: the last chunk needs `window` prompt tokens."""
        return self.scorer.needs_attention

    @property
    def min_last_chunk(self) -> int:
        """Prompt tokens that the prefill's last chunk must have, where prefill is chunked.

        The scorer needs the whole window's queries at once. Two at least: a chunk of one token
        looks like a decode step, which captured graphs replay without coming by any eviction.
        """
        return max(self.window, 2) if self.needs_scores else 2

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
        if budget.tokens is not None and budget.tokens < self.min_budget:
            raise ValueError(
                f"budget {budget.tokens} is too small for policy {self.name!r}: it keeps a window "
                f"of {self.window} and {self.sinks} sinks in every layer and needs at least one "
                f"token more; set a budget of at least {self.min_budget}, or a smaller window"
            )

    def plan(
        self, prompt_len: int, num_layers: int, block_size: int, budget: Budget | None = None
    ) -> RetentionPlan:
        """How much each layer keeps of a prompt. Pure and cached: equal arguments, same object.

        The mean of `keep` over the layers is exactly `budget_tokens`, for every allocator.

        Args:
            prompt_len: tokens of the prompt. num_layers: attention layers that are evicted from.
            block_size: tokens of a cache block. budget: a request's own instead of the policy's;
                it must have passed `check_budget`.
        """
        return _plan(self, prompt_len, num_layers, block_size, budget or self.budget)

    def kept_positions(self, prompt_len: int, keep: int) -> IntArray:
        """The positions a policy without attention scores keeps: `[keep]` int32, ascending.

        They are the same for all heads: the sinks and the most recent tokens, or everything.

        Args:
            prompt_len: tokens of the prompt. keep: how many stay, `sinks <= keep <= prompt_len`
                unless nothing is evicted; pass `RetentionPlan.held` for what is really kept.
        """
        assert not self.needs_scores, f"{self.name}: positions depend on attention scores"
        assert 0 <= keep <= prompt_len, (keep, prompt_len)
        sinks = min(self.sinks, keep)
        head = np.arange(sinks, dtype=np.int32)
        return np.concatenate([head, np.arange(prompt_len - keep + sinks, prompt_len, dtype="i4")])


@lru_cache(maxsize=8192)
def _plan(
    policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
) -> RetentionPlan:
    assert prompt_len >= 0 and num_layers >= 1 and block_size >= 1
    mean = prompt_len
    if policy.evicts:
        mean = budget.tokens_for(prompt_len, policy.min_budget)
    if mean == prompt_len:
        keep = np.full(num_layers, prompt_len)
    else:
        fixed = policy.window + policy.sinks
        assert fixed < mean, (fixed, mean, "the budget was not checked")
        rest = policy.allocator.allocate(mean - fixed, num_layers, prompt_len - fixed)
        keep = fixed + rest
    skip = prompt_len - keep
    if policy.fill_blocks:
        skip = skip // block_size * block_size
    return RetentionPlan(prompt_len, block_size, mean, _read_only(keep), _read_only(skip))
