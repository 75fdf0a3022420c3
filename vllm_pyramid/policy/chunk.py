# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt, so that a request never holds much more than its budget.

    computed tokens   0 ........ E ........ 2 E ........ 3 E ... n
    eviction                     -            1            2     3      (E = `tokens`, n = prompt)

Points stand every E tokens, up to the last one with a whole observation window behind it: they
depend on the prompt's length and the policy alone. At each, every layer goes back to what the
policy's allocator gives it of `keep` tokens on average, so between two a layer holds its share and
E tokens. Points at which there is nothing to give yet are left out. At the prompt's end the policy
evicts as always, of what is left.

The queries before a point know nothing of the question at the prompt's end. So more is kept there
than at the end, and another scorer chooses.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from vllm_pyramid.plan import Budget, Plan, RetentionPlan
from vllm_pyramid.policy.component import Component
from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerHooks, WorkerSide


def _tokens_behind(policy: Policy) -> int:
    """Tokens that a prompt has behind a point at least: all that its end keeps or looks back on."""
    return max(policy.min_last_chunk, policy.window, policy.scorer.history or 0, 2)


def _parse_scorer(value: object) -> Scorer | None:
    return None if value is None else parse_component(Scorer, value)


class Chunk(Component):
    """Base of the only kind; see `EvictionPoints`."""

    section: ClassVar[str] = "chunk"


class EvictionPoints(Chunk):
    """Evictions inside the prompt, or none.

    Attributes:
        tokens: E, between two points; 0: the prompt's end is the first eviction.
        keep: tokens kept per layer and KV head on average at a point, window and sinks included;
            at least the budget of the prompt in any case. None: E, or the budget where that is
            more.
        scorer: what scores at points; None: the policy's. KeyDiff looks at keys alone, and was
            made for prompts that are read in pieces (arXiv:2504.15364): scores of queries, which
            know no question yet, lose what it will be about (docs/quality.md).
        window: tokens before a point that stay in any case, and whose queries score the others
            where the scorer needs queries; None: the policy's.
    """

    kind: Literal["points"] = "points"
    tokens: int = Field(default=0, ge=0, lt=2**31)
    keep: int | None = Field(default=None, ge=1, lt=2**31)
    scorer: Annotated[SerializeAsAny[Scorer] | None, BeforeValidator(_parse_scorer)] = Field(
        default_factory=partial(parse_component, Scorer, "keydiff")
    )
    window: int | None = Field(default=None, ge=0)

    def inside(self, policy: Policy) -> Policy | None:
        """The policy that evicts at points: to it, what is computed by then is a prompt."""
        if not self.tokens:
            return None
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
            }
        )

    def worst_length(self, policy: Policy, longest: int) -> int:
        """Of all prompts with at most so many tokens, one that holds most in its last stretch.

        Behind its last point it has as many tokens as can be without a further one.
        """
        if not self.tokens:
            return longest
        return max(longest - (longest - _tokens_behind(policy) + 1) % self.tokens, 1)

    def plan(self, policy: Policy, plan: Plan) -> Plan:
        """The plan with the evictions inside its prompt."""
        inside = policy.inside
        if inside is None or not plan.evicts:
            return plan
        assert isinstance(plan, RetentionPlan)
        last = (plan.prompt_len - _tokens_behind(policy)) // self.tokens
        assert inside.budget.tokens is not None
        keep = Budget(tokens=max(inside.budget.tokens, plan.budget_tokens))
        return plan.with_inner(
            [
                inside.plan(number * self.tokens, plan.num_layers, plan.block_size, keep)
                .estimate()
                .end
                for number in range(1, last + 1)
                if number * self.tokens > keep.tokens_for(plan.prompt_len, 0)
            ]
        )

    # Answers of a part --------------------------------------------------------------------------

    @property
    def works_in_every_step(self) -> bool:
        """See the base: what goes for the scorer inside the prompt."""
        return self.tokens > 0 and self.scorer is not None and self.scorer.works_in_every_step

    @property
    def works_during_prompt(self) -> bool:
        """See the base."""
        return self.tokens > 0

    def check(self, policy: Policy) -> None:
        """See the base."""
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
        if policy.allocator.solves or policy.allocator.thins_prompts:
            why = (
                "solves the lengths from the scores of a whole prompt"
                if policy.allocator.solves
                else "thins prompts between layers, piece by piece, in its own way"
            )
            raise ValueError(
                f"policy {policy.name!r} cannot evict inside the prompt (chunk.tokens): its "
                f"allocator {policy.allocator.kind!r} {why}; choose a policy with another "
                "allocator, such as snapkv-chunked or pyramidkv-chunked"
            )
        inside = policy.inside  # which is checked as it is made
        assert inside is not None
        for scorer, where in ((policy.scorer, ""), (inside.scorer, "chunk.")):
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
        least = max(inside.min_budget, inside.min_last_chunk, _tokens_behind(policy))
        if self.tokens < least:
            raise ValueError(
                f"policy {policy.name!r}: chunk.tokens {self.tokens} is too small for its windows "
                f"and sinks: set at least {least}"
            )

    def not_shareable(self, policy: Policy) -> str | None:
        """See the base: what goes for the scorer inside the prompt."""
        inside = policy.inside
        return None if inside is None else inside.not_shareable

    def not_resumable(self, policy: Policy) -> str | None:
        """See the base."""
        if self.tokens:
            return "it evicts at points of its own inside the prompt (chunk.tokens)"
        return super().not_resumable(policy)

    def check_request(self, policy: Policy, params: SamplingParams) -> None:
        """See the base."""
        if self.tokens and params.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs would be those of an evicted cache: this policy evicts inside the "
                "prompt (chunk.tokens); leave them out, or ask with kv_policy full"
            )

    def worker_hooks(self, policy: Policy, side: WorkerSide) -> WorkerHooks | None:
        """What a scorer of its own gathers between points."""
        inside = policy.inside
        if inside is None or inside.scorer == policy.scorer:
            return None
        hooks = inside.scorer.worker_hooks(inside, side)
        if hooks is not None:
            hooks.inside = True
        return hooks
