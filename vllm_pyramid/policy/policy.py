# SPDX-License-Identifier: Apache-2.0
"""A policy: its parts and a budget. It never sees requests or blocks.

How many tokens each layer keeps is a pure function of the prompt's length (`Policy.plan`); the
parts choose which tokens. It travels to other processes as data (`Policy.as_data`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

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

from vllm_pyramid.plan import Budget, IntArray, Plan
from vllm_pyramid.policy.allocator import Allocator
from vllm_pyramid.policy.attend import Attend, DenseAttention
from vllm_pyramid.policy.capabilities import Feature, Refusal, refusals_of, why_not
from vllm_pyramid.policy.chunk import Chunk, EvictionPoints
from vllm_pyramid.policy.component import BlockExtras, Component
from vllm_pyramid.policy.heads import AlikeHeads, Heads
from vllm_pyramid.policy.kept_spans import Spans
from vllm_pyramid.policy.kinds import parse_component, parsed_by
from vllm_pyramid.policy.planning import plan_prompt
from vllm_pyramid.policy.schedules import PromptEndSchedule, Schedule
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector, TopKSelector
from vllm_pyramid.policy.values import DeviceValues, Values

if TYPE_CHECKING:
    from vllm_pyramid.step.hooks import LayerSpec, SchedulerHooks, WorkerContext, WorkerHooks

# Queries whose attention a trace reports if the policy's scorer uses none: PyramidKV's 8.
TRACE_WINDOW = 8
# The floor of percentage budgets of a server, unless it is set (measured: docs/quality.md).
DEFAULT_MIN_TOKENS = 256
# Tokens between two evictions at turn ends, at least: more than a decode step with its drafts.
MIN_TURN = 32
# Base classes of the sections of a preset.
SECTIONS: dict[str, type[Component]] = {
    base.section: base
    for base in (Scorer, Allocator, Selector, Schedule, Values, Chunk, Attend, Heads)
}


class Policy(BaseModel):
    """A method of KV eviction; immutable, hashable, picklable.

    Attributes:
        name: its name for users. description: the idea in one line. paper: title and link.
        budget: mean tokens kept per layer and KV head, window and sinks included.
        window: the prompt's last tokens, kept in every layer; for a scorer that needs queries, the
            observation window whose queries score the others.
        sinks: the prompt's first tokens, kept in every layer.
        min_tokens: the floor of percentage budgets, so prompts up to this length are kept whole;
            None: the server's. It does not apply to a budget in tokens.
        fill_blocks: whether the next best tokens fill the last block of a layer (same memory);
            otherwise exactly the paper's number is kept.
        scorer, allocator, selector, schedule, values, chunk, attend, heads: the parts,
            see `vllm_pyramid.methods`.
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
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    fill_blocks: bool = True
    scorer: Annotated[SerializeAsAny[Scorer], parsed_by(Scorer)]
    allocator: Annotated[SerializeAsAny[Allocator], parsed_by(Allocator)] = Field(
        default_factory=partial(parse_component, Allocator, "uniform")
    )
    selector: Annotated[SerializeAsAny[Selector], parsed_by(Selector)] = Field(
        default_factory=TopKSelector
    )
    schedule: Annotated[SerializeAsAny[Schedule], parsed_by(Schedule)] = Field(
        default_factory=PromptEndSchedule
    )
    values: Annotated[SerializeAsAny[Values], parsed_by(Values)] = Field(
        default_factory=DeviceValues
    )
    chunk: Annotated[SerializeAsAny[EvictionPoints], parsed_by(Chunk)] = Field(
        default_factory=EvictionPoints
    )
    attend: Annotated[SerializeAsAny[Attend], parsed_by(Attend)] = Field(
        default_factory=DenseAttention
    )
    heads: Annotated[SerializeAsAny[Heads], parsed_by(Heads)] = Field(default_factory=AlikeHeads)

    @model_validator(mode="after")
    def _check(self) -> Policy:
        if self.name == "none" or (
            self.name == "full"
            and (self.evicts or self.values != DeviceValues() or self.attend.selects)
        ):
            raise ValueError(
                f"the name {self.name!r} is reserved (none: plugin off, full: everything kept on "
                "the device, and read): give this policy another one"
                + (", or choose kcache or select" if not self.evicts else "")
            )
        for part in self.parts:
            part.check(self)
        self.check_budget(self.budget)
        return self

    @property
    def parts(self) -> tuple[Component, ...]:
        """All parts, in the order in which their hooks are called."""
        return (
            self.scorer,
            self.allocator,
            self.selector,
            self.schedule,
            self.values,
            self.chunk,
            self.attend,
            self.heads,
        )

    @cached_property
    def inner_policy(self) -> Policy | None:
        return self.chunk.inner_policy(self)

    # As data ------------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Return the policy as JSON values; another process validates them."""
        return self.model_dump(mode="json")

    @cached_property
    def stable_hash(self) -> int:
        """A hash that is equal in every process, unlike that of a string."""
        return zlib.crc32(self.model_dump_json().encode())

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of memory at most, measured: ten for each character of JSON."""
        return 10 * len(self.model_dump_json())

    def __hash__(self) -> int:
        return self.stable_hash

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Policy:
        """Return a validated copy with other values; pydantic's own method skips the checks."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})

    # What it asks for ---------------------------------------------------------------------------

    @property
    def evicts(self) -> bool:
        return self.scorer.evicts

    @property
    def has_budget(self) -> bool:
        """Whether the policy drops tokens, and a budget says how many stay."""
        return self.evicts and self.heads.has_budget

    @property
    def defers(self) -> bool:
        """Whether lengths are decided from a prompt's scores at its end: plans are deferred."""
        return self.allocator.defers or self.heads.defers

    @property
    def min_last_chunk(self) -> int:
        """Prompt tokens that the last chunk of a chunked prefill must have: the whole window's
        queries.

        At least two, because a chunk of one token looks like a decode step, which captured graphs
        replay without any eviction; policies that work in every step run without such graphs.
        """
        if self.works_in_every_step:
            looks_back = self.scorer.needs_queries or self.scorer.keeps_queries
            return self.window if looks_back and not self.schedule.keeps_prompts else 1
        return max(self.window, 2) if self.scorer.needs_queries else 2

    @property
    def trace_window(self) -> int:
        """How many of a prompt's last queries a trace computes recall with."""
        return self.window if self.scorer.needs_queries else TRACE_WINDOW

    @property
    def works_in_every_step(self) -> bool:
        return any(part.works_in_every_step for part in self.parts)

    @property
    def attends(self) -> bool:
        return any(part.attends for part in self.parts)

    def excludes_graphs(self, stages: int) -> bool:
        """Say whether parts that attend, of any stage, forbid a graph of a whole decode step."""
        of_attention = [part for part in self.parts if part.attends]
        if stages > 1:
            return bool(of_attention)
        return not all(part.attends_in_graphs for part in of_attention)

    @property
    def approximates_answers(self) -> bool:
        return any(part.approximates_answers for part in self.parts)

    @property
    def splits_at_prompt_end(self) -> bool:
        return any(part.splits_at_prompt_end for part in self.parts)

    @cached_property
    def refusals(self) -> tuple[Refusal, ...]:
        return refusals_of(self)

    def why_not(self, feature: Feature, used: Iterable[Feature] = ()) -> str | None:
        return why_not(self.refusals, feature, used)

    @property
    def min_turn(self) -> int:
        """Tokens between two evictions at turn ends, at least: all scoring queries exist."""
        return max(self.min_last_chunk, MIN_TURN)

    @property
    def copies_blocks(self) -> bool:
        return all(part.copies_blocks for part in self.parts)

    @property
    def min_budget(self) -> int:
        """The smallest budget in tokens: window, sinks and one token to choose."""
        return self.window + self.sinks + 1

    def check_layers(self, num_layers: int) -> None:
        for part in self.parts:
            part.check_layers(num_layers)

    def check_budget(self, budget: Budget) -> None:
        for part in self.parts:
            part.check_budget(self, budget)
        if budget.tokens is not None and budget.tokens < self.min_budget:
            raise ValueError(
                f"budget {budget.tokens} is too small for policy {self.name!r}: it keeps a window "
                f"of {self.window} and {self.sinks} sinks in every layer and needs at least one "
                f"token more; set a budget of at least {self.min_budget}, or a smaller window"
            )

    def block_sizes(self, num_layers: int, block_size: int) -> IntArray:
        """Return the tokens of a block, twice as many without V: `[num_layers]` int32."""
        both = [self.values.on_device(layer) for layer in range(num_layers)]
        return np.where(both, block_size, 2 * block_size).astype(np.int32)

    def plan(
        self,
        prompt_len: int,
        num_layers: int,
        block_size: int,
        budget: Budget | None = None,
        turns: tuple[int, ...] = (),
        spans: Spans = (),
    ) -> Plan:
        """Return how much each layer keeps of a prompt. Cached: equal arguments, same object.

        The mean of `keep` over the layers is exactly `budget_tokens`, and what spans protect,
        unless the allocator sets its own total.

        Args:
            block_size: tokens of a cache block; the largest if layers differ.
            budget: the request's own instead of the policy's; it must have passed `check_budget`.
            turns: where earlier turns' prompts ended, increasing and below `prompt_len`; only if
                `kv_turns` work with the policy.
            spans: of the prompt, merged (`kept_spans`); only if `kv_keep` works with the policy.

        Returns:
            A `RetentionPlan`, or a `DeferredPlan` if the lengths depend on the prompt's scores and
                the prompt may be shortened.

        Raises:
            ValueError: a part is made for another number of layers.
        """
        budget = (budget or self.budget).with_floor(self.min_tokens)
        spans = spans if self.evicts else ()  # everything stays anyway
        return plan_prompt(self, prompt_len, num_layers, block_size, budget, turns, spans)

    # In the engine ------------------------------------------------------------------------------

    def block_extras(self, layer: LayerSpec) -> list[BlockExtras]:
        """Return what parts keep beside each block of a layer, in the order of the parts."""
        found = [part.block_extras(layer) for part in self.parts]
        return [extras for extras in found if extras is not None]

    def extra_bytes(self, layer: LayerSpec) -> int:
        """Return the bytes beside each block of a layer that the host cache keeps with it."""
        return sum(extras.num_bytes for extras in self.block_extras(layer))

    def worker_hooks(self, context: WorkerContext) -> list[WorkerHooks]:
        found = [part.worker_hooks(self, context) for part in self.parts]
        return [hooks for hooks in found if hooks is not None]

    def scheduler_hooks(self, num_layers: int) -> list[SchedulerHooks]:
        found = [part.scheduler_hooks(self, num_layers) for part in self.parts]
        return [hooks for hooks in found if hooks is not None]
