# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt, so that a request never holds much more than its budget.

    computed tokens   0 ........ E ........ 2 E ........ 3 E ... n
    eviction                     -            1            2     3      (E = `tokens`, n = prompt)

Points follow every E tokens, up to the last one with a whole observation window behind it: they
depend on the prompt's length and the policy alone. At each point the allocator divides a mean of
`keep` tokens between the layers. Points at which no layer has anything to give back are left out.
The queries before a point know nothing of the question at the prompt's end: therefore more is kept
there, and another scorer chooses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from vllm_pyramid.plan import Budget, Plan, RetentionPlan
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component
from vllm_pyramid.policy.kept_spans import Spans, end_points
from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks


def _tokens_behind(policy: Policy) -> int:
    """Return how many tokens follow the last point at least: all that the end looks back on."""
    return max(policy.min_last_chunk, policy.window, policy.scorer.history or 0, 2)


def _parse_scorer(value: object) -> Scorer | None:
    return None if value is None else parse_component(Scorer, value)


class Chunk(Component):
    """Base class of the section `chunk`, whose only kind is `EvictionPoints`."""

    section: ClassVar[str] = "chunk"


class EvictionPoints(Chunk):
    """Evict inside the prompt every `tokens` tokens, or not at all.

    What it bounds, costs and refuses: docs/policies.md#evicting-inside-the-prompt.

    Attributes:
        tokens: E, between two points; 0: the prompt's end is the first eviction.
        keep: mean tokens kept per layer and KV head at a point, window and sinks included; raised
            to the prompt's budget if that is more. None: E.
        scorer: what scores at points; None: the policy's. The default, KeyDiff, uses keys alone and
            was made for prompts that are read in pieces (arXiv:2504.15364). Scores of queries that
            do not know the question yet lose what it will be about (docs/quality.md).
        window: the last tokens before a point, which stay; their queries score the others if the
            scorer needs queries. None: the policy's.
    """

    kind: Literal["points"] = "points"
    tokens: int = Field(default=0, ge=0, lt=2**31)
    keep: int | None = Field(default=None, ge=1, lt=2**31)
    scorer: Annotated[SerializeAsAny[Scorer] | None, BeforeValidator(_parse_scorer)] = Field(
        default_factory=partial(parse_component, Scorer, "keydiff")
    )
    window: int | None = Field(default=None, ge=0)

    def inner_policy(self, policy: Policy) -> Policy | None:
        if not self.tokens:
            return None
        if policy.heads.splits and not policy.heads.has_budget:  # they say what points keep, too
            return policy.model_copy(update={"fill_blocks": True, "chunk": EvictionPoints()})
        return policy.model_copy(
            update={
                "budget": Budget(tokens=self.keep or self.tokens),
                "min_tokens": None,
                "window": policy.window if self.window is None else self.window,
                # The kernels score whole blocks.
                "fill_blocks": True,
                "scorer": self.scorer or policy.scorer,
                "schedule": "prompt_end",
                "chunk": EvictionPoints(),
                "attend": "all",
                "heads": policy.heads.model_dump(),
            }
        )

    def worst_length(self, policy: Policy, longest: int) -> int:
        """Return the length, up to `longest`, of a prompt that holds most blocks."""
        if not self.tokens:
            return longest
        return max(longest - (longest - _tokens_behind(policy) + 1) % self.tokens, 1)

    def points(self, policy: Policy, prompt_len: int) -> list[int]:
        """Return the tokens computed at each point inside a prompt."""
        if not self.tokens:
            return []
        last = (prompt_len - _tokens_behind(policy)) // self.tokens
        return [number * self.tokens for number in range(1, last + 1)]

    def plan(self, policy: Policy, plan: Plan, spans: Spans) -> Plan:
        """Return the plan with the evictions inside its prompt; `spans` stay at each of them."""
        inner = policy.inner_policy
        if inner is None or not plan.evicts:
            return plan
        assert isinstance(plan, RetentionPlan)
        assert inner.budget.tokens is not None
        keep = Budget(tokens=max(inner.budget.tokens, plan.budget_tokens))
        whole = keep.tokens_for(plan.prompt_len, 0)
        points = [point for point in self.points(policy, plan.prompt_len) if point > whole]
        of_plan = plan.num_layers, plan.block_size
        return plan.with_inner(end_points(inner, points, *of_plan, keep, spans))

    @property
    def works_in_every_step(self) -> bool:
        return self.tokens > 0 and self.scorer is not None and self.scorer.works_in_every_step

    @property
    def works_during_prompt(self) -> bool:
        return self.tokens > 0

    def check(self, policy: Policy) -> None:
        if not self.tokens:
            if self != EvictionPoints():
                raise ValueError(
                    f"policy {policy.name!r} sets chunk.keep, chunk.scorer or chunk.window, which "
                    "say what happens at evictions inside the prompt: set chunk.tokens too"
                )
            return
        if not policy.evicts:
            raise ValueError(
                f"policy {policy.name!r} keeps every token, so chunk.tokens has no effect: leave "
                "it out"
            )
        if policy.allocator.defers or policy.allocator.thins_prompts:
            why = (
                "decides the lengths from the scores of a whole prompt"
                if policy.allocator.defers
                else "thins prompts between layers, piece by piece, in its own way"
            )
            raise ValueError(
                f"policy {policy.name!r} cannot evict inside the prompt (chunk.tokens): its "
                f"allocator {policy.allocator.kind!r} {why}; choose a policy with another "
                "allocator, such as snapkv-chunked or pyramidkv-chunked"
            )
        inner = policy.inner_policy  # which is checked as it is made
        assert inner is not None
        for scorer, where in ((policy.scorer, ""), (inner.scorer, "chunk.")):
            if scorer.needs_positions:
                raise ValueError(
                    f"policy {policy.name!r} evicts inside the prompt (chunk.tokens), and "
                    f"{where}scorer {scorer.kind!r} needs positions, which survivors of an "
                    "eviction do not have: choose another"
                )
            if scorer.history is not None and scorer.history > self.tokens:
                raise ValueError(
                    f"policy {policy.name!r}: {where}scorer {scorer.kind!r} looks back over "
                    f"{scorer.history} queries, and chunk.tokens is {self.tokens}: it must not "
                    "look beyond the eviction before"
                )
        smallest = max(inner.min_budget, inner.min_last_chunk, _tokens_behind(policy))
        if self.tokens < smallest:
            raise ValueError(
                f"policy {policy.name!r}: chunk.tokens {self.tokens} is too small for its windows "
                f"and sinks: set at least {smallest}"
            )

    @property
    def unsupported(self) -> Unsupported:
        if not self.tokens:
            return {}
        inside = "it evicts inside the prompt (chunk.tokens)"
        return {
            Feature.KV_TURNS: f"{inside}, at points of its own",
            Feature.PROMPT_LOGPROBS: f"{inside}, so they would be those of an evicted cache",
            Feature.INNER_SPANS: f"{inside}, behind which each KV head holds other tokens",
            Feature.SHADOW: f"{inside}, so prompts that are held whole may not fit",
        }

    @property
    def of_graph(self) -> Any:
        return None if self.scorer is None else self.scorer.of_graph

    @property
    def works_with_orders(self) -> bool:
        return not self.tokens

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        inner = policy.inner_policy
        if inner is None or inner.scorer == policy.scorer:
            return None
        return inner.scorer.worker_hooks(inner, replace(context, inside=True))
