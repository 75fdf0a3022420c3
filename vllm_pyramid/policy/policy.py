# SPDX-License-Identifier: Apache-2.0
"""A policy: its parts and a budget.

A policy answers, as a pure function of the prompt's length, how many tokens each layer keeps, or,
where that depends on the prompt's attention, how many all of them together; its parts say which. It
never sees requests or blocks, so the scheduler and every worker can call it on their own and agree.
It is read and checked once, in the front end, and travels to the other processes as data
(`Policy.as_data`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
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

from vllm_pyramid.plan import Budget, IntArray, Plan, RetentionPlan, peak_blocks, with_turns
from vllm_pyramid.policy.allocator import Allocator
from vllm_pyramid.policy.chunk import Chunk, EvictionPoints
from vllm_pyramid.policy.component import Component
from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.schedules import PromptEndSchedule, Schedule
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector, TopKSelector
from vllm_pyramid.policy.values import DeviceValues, Values

if TYPE_CHECKING:
    from vllm_pyramid.step.hooks import SchedulerHooks, WorkerHooks, WorkerSide

# Queries whose attention a trace reports on where the policy scores with none: PyramidKV's 8.
TRACE_WINDOW = 8
# Where a policy is served and nothing else is said, no share of a prompt falls below so many tokens
# (measured: docs/quality.md).
DEFAULT_MIN_TOKENS = 256
# The least distance of two evictions at turn ends: more than a decode step has, drafts included.
MIN_TURN = 32
# Base classes of the sections of a preset.
SECTIONS: dict[str, type[Component]] = {
    base.section: base for base in (Scorer, Allocator, Selector, Schedule, Values, Chunk)
}


def _parsed_by(base: type[Component]) -> BeforeValidator:
    def parse(value: object) -> Component:
        return parse_component(base, value)

    return BeforeValidator(parse)


class Policy(BaseModel):
    """A method of KV eviction; immutable, hashable, picklable.

    Attributes:
        name: what users call it. description: the idea in one line. paper: title and link.
        budget: mean tokens kept per layer and KV head, window and sinks included.
        window: the prompt's last tokens, kept in every layer; with a scorer that needs queries
            they are the observation window whose queries score the others.
        sinks: the prompt's first tokens, kept in every layer.
        min_tokens: the least that a share of a prompt comes to, so that prompts up to this length
            are kept whole; None: what the server is set to. A budget in tokens is what it says.
        fill_blocks: fill the room that rounding to blocks leaves with the next best tokens (same
            memory) instead of keeping exactly the paper's number.
        scorer, allocator, selector, schedule, values, chunk: the parts, see
            `vllm_pyramid.methods`.
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
    scorer: Annotated[SerializeAsAny[Scorer], _parsed_by(Scorer)]
    allocator: Annotated[SerializeAsAny[Allocator], _parsed_by(Allocator)] = Field(
        default_factory=partial(parse_component, Allocator, "uniform")
    )
    selector: Annotated[SerializeAsAny[Selector], _parsed_by(Selector)] = Field(
        default_factory=TopKSelector
    )
    schedule: Annotated[SerializeAsAny[Schedule], _parsed_by(Schedule)] = Field(
        default_factory=PromptEndSchedule
    )
    values: Annotated[SerializeAsAny[Values], _parsed_by(Values)] = Field(
        default_factory=DeviceValues
    )
    chunk: Annotated[SerializeAsAny[EvictionPoints], _parsed_by(Chunk)] = Field(
        default_factory=EvictionPoints
    )

    @model_validator(mode="after")
    def _check(self) -> Policy:
        if self.name == "none" or (
            self.name == "full" and (self.evicts or self.values != DeviceValues())
        ):
            raise ValueError(
                f"the name {self.name!r} is reserved (none: plugin off, full: everything kept on "
                "the device): give this policy another one"
                + (", or choose kcache" if not self.evicts else "")
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
        )

    @cached_property
    def inside(self) -> Policy | None:
        """The policy that evicts at points inside the prompt; None: nothing does."""
        return self.chunk.inside(self)

    # As data ------------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """The policy as JSON has it; `Policy.model_validate` reads it in another process."""
        return self.model_dump(mode="json")

    @cached_property
    def stable_hash(self) -> int:
        """A hash that is equal in every process, unlike that of a string: it travels by pickle."""
        return zlib.crc32(self.model_dump_json().encode())

    def __hash__(self) -> int:
        return self.stable_hash

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Policy:
        """A validated copy with other values; pydantic's own would skip the checks."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})

    # What it asks for ---------------------------------------------------------------------------

    @property
    def evicts(self) -> bool:
        """False for a policy that keeps everything, whatever the prompt's length."""
        return self.scorer.evicts

    @property
    def min_last_chunk(self) -> int:
        """Prompt tokens that the prefill's last chunk must have, where prefill is chunked.

        The scorer needs the whole window's queries at once. Two at least: a chunk of one token
        looks like a decode step, which captured graphs replay without coming by any eviction.
        Policies that work in every step are not served with such graphs.
        """
        if self.works_in_every_step:
            return self.window if self.scorer.needs_queries else 1
        return max(self.window, 2) if self.scorer.needs_queries else 2

    @property
    def trace_window(self) -> int:
        """How many of a prompt's last queries a trace takes the attention of, for its recall."""
        return self.window if self.scorer.needs_queries else TRACE_WINDOW

    @property
    def works_in_every_step(self) -> bool:
        """True if decode steps do more than attention: gather scores, or evict."""
        return any(part.works_in_every_step for part in self.parts)

    @property
    def attends(self) -> bool:
        """Whether a part attends in some layers' place, which no full graph may cover."""
        return any(part.attends for part in self.parts)

    @property
    def splits_at_prompt_end(self) -> bool:
        """Whether no step may have tokens of the prompt and tokens behind it, evicting or not."""
        return any(part.splits_at_prompt_end for part in self.parts)

    @property
    def not_shareable(self) -> str | None:
        """Why a request cannot begin with what others have computed; None: it can."""
        return next(filter(None, (part.not_shareable(self) for part in self.parts)), None)

    @property
    def not_resumable(self) -> str | None:
        """Why evictions cannot stand where a conversation's earlier turns ended; None: they can."""
        if not self.fill_blocks:
            return "fill_blocks is false, and later evictions score whole blocks"
        return next(filter(None, (part.not_resumable(self) for part in self.parts)), None)

    @property
    def min_turn(self) -> int:
        """Tokens between two evictions at turn ends, at least: all queries that score are there."""
        return max(self.min_last_chunk, MIN_TURN)

    def shareable_tokens(self, plan: Plan) -> int | None:
        """The first tokens of a request whose blocks it may share; None: all, generated ones too.

        Their KV is that of the full cache, whatever the policy and the budget, and no eviction of
        this request writes into their blocks.
        """
        reusable = self.reusable_tokens(plan)
        return reusable if plan.untouched is None or reusable == 0 else plan.untouched

    def reusable_tokens(self, plan: Plan) -> int | None:
        """The first tokens whose KV is that of the full cache; None: all, generated ones too.

        Behind `shareable_tokens` they are copied into blocks of the request's own, and out of them
        before it evicts.
        """
        if self.not_shareable is not None or plan.pieces:
            return 0
        if plan.untouched is None:
            return plan.prompt_len if self.splits_at_prompt_end else None
        return plan.exact_tokens if self.copies_blocks else plan.untouched

    @property
    def copies_blocks(self) -> bool:
        """Whether a block can be copied as one page of the device."""
        return all(part.copies_blocks for part in self.parts)

    @property
    def min_budget(self) -> int:
        """The smallest budget in tokens: window and sinks, and one token to choose."""
        return self.window + self.sinks + 1

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if the policy cannot work with a model of so many layers."""
        for part in self.parts:
            part.check_layers(num_layers)

    def check_hybrid(self) -> None:
        """Raise ValueError if the policy cannot work where some layers of a model do not evict."""
        for part in self.parts:
            part.check_hybrid(self)

    def check_budget(self, budget: Budget) -> None:
        """Raise ValueError if this policy cannot work with the budget."""
        for part in self.parts:
            part.check_budget(self, budget)
        if budget.tokens is not None and budget.tokens < self.min_budget:
            raise ValueError(
                f"budget {budget.tokens} is too small for policy {self.name!r}: it keeps a window "
                f"of {self.window} and {self.sinks} sinks in every layer and needs at least one "
                f"token more; set a budget of at least {self.min_budget}, or a smaller window"
            )

    def block_sizes(self, num_layers: int, block_size: int) -> IntArray:
        """Tokens of a cache block in each layer, `[num_layers]` int32.

        Args:
            block_size: tokens of a block of K and V. Without V twice as many fit, so that the
                blocks of all layers have one size in bytes and come from one pool.
        """
        both = [self.values.on_device(layer) for layer in range(num_layers)]
        return np.where(both, block_size, 2 * block_size).astype(np.int32)

    def plan(
        self,
        prompt_len: int,
        num_layers: int,
        block_size: int,
        budget: Budget | None = None,
        turns: tuple[int, ...] = (),
    ) -> Plan:
        """How much each layer keeps of a prompt. Pure and cached: equal arguments, same object.

        The mean of `keep` over the layers is exactly `budget_tokens`, for every allocator that
        does not set its own total.

        Args:
            prompt_len: tokens of the prompt. num_layers: attention layers that are evicted from.
            block_size: tokens of a cache block; the largest, where layers differ.
            budget: a request's own instead of the policy's; it must have passed `check_budget`.
            turns: where earlier turns' prompts ended, increasing and below `prompt_len`; only of
                a policy that is not `not_resumable`.

        Returns:
            A `RetentionPlan`; where the lengths depend on the prompt's scores and it may be
            shortened, an `DeferredPlan`, from which the solved lengths make a `RetentionPlan`.
            Where prompts are thinned between layers, the plan has pieces, and the mean of its
            `keep` is what the method's schedule comes to. What is kept at evictions inside the
            prompt and after its end is in `RetentionPlan.after`.

        Raises:
            ValueError: a part is made for another number of layers.
        """
        budget = (budget or self.budget).with_floor(self.min_tokens)
        return _plan(self, prompt_len, num_layers, block_size, budget, turns)

    def may_evict_after(self, tokens: int, num_layers: int, block_size: int) -> bool:
        """Whether a chunk of up to so many tokens can be all that there is before an eviction.

        It can where prompts so short are evicted with some budget that is allowed, or evictions
        inside a prompt are so close. True where nobody can say: with a policy whose budget is not
        a number of tokens.
        """
        if 0 < self.chunk.tokens <= tokens:
            return True
        budget = Budget(tokens=self.min_budget)
        anything = self.model_copy(update={"min_tokens": None})
        try:
            self.check_budget(budget)
        except ValueError:
            return True
        lengths = range(1, tokens + 1)
        plans = (anything.plan(length, num_layers, block_size, budget) for length in lengths)
        return any(plan.evicts for plan in plans)

    def most_blocks(
        self, longest: int, num_layers: int, block_size: int, stages: Sequence[int] = ()
    ) -> IntArray:
        """Blocks of each layer when all together hold most, whatever the prompt up to some length.

        With evictions that bound what is generated, until the first of them, too.

        Args:
            longest: tokens that a prompt has at most. block_size: of K and V.
            stages: see `peak_blocks`.

        Returns:
            `[num_layers]`; their sum is what a pool must have, or each stage's sum its own pool.
        """
        sizes = self.block_sizes(num_layers, block_size)
        later = self.schedule.every if self.inside is not None else 0
        ends = np.cumsum(stages or (num_layers,))[:-1]
        most = [
            np.split(
                peak_blocks(
                    self.plan(length, num_layers, int(sizes.max())),
                    length + later,
                    sizes,
                    stages=stages,
                ),
                ends,
            )
            for length in {longest, self.chunk.worst_length(self, longest)}
        ]
        worst = [max(of_stage, key=np.sum) for of_stage in zip(*most, strict=True)]
        # Where blocks begin in another prompt, a layer may touch one more.
        blocks = np.concatenate(worst) + (self.inside is not None)
        return np.minimum(blocks, -(-longest // sizes)).astype(np.int32)

    # In the engine ------------------------------------------------------------------------------

    def worker_hooks(self, side: WorkerSide) -> list[WorkerHooks]:
        """What the parts do in a worker beside scoring, in the order of the parts."""
        found = [part.worker_hooks(self, side) for part in self.parts]
        return [hooks for hooks in found if hooks is not None]

    def scheduler_hooks(self, num_layers: int) -> list[SchedulerHooks]:
        """What the parts do in the scheduler, in the order of the parts."""
        found = [part.scheduler_hooks(self, num_layers) for part in self.parts]
        return [hooks for hooks in found if hooks is not None]


@lru_cache(maxsize=8192)
def _plan(
    policy: Policy,
    prompt_len: int,
    num_layers: int,
    block_size: int,
    budget: Budget,
    turns: tuple[int, ...],
) -> Plan:
    assert prompt_len >= 0 and num_layers >= 1 and block_size >= 1
    policy.check_layers(num_layers)
    plan = policy.allocator.plan(policy, prompt_len, num_layers, block_size, budget)
    if not turns:
        return policy.chunk.plan(policy, plan)
    before = [_plan(policy, turn, num_layers, block_size, budget, ()) for turn in turns]
    assert isinstance(plan, RetentionPlan) and turns[-1] < prompt_len
    return with_turns(plan, [turn.estimate().end for turn in before], policy.min_turn)
