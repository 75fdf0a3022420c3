# SPDX-License-Identifier: Apache-2.0
"""Recovering heads: each KV head keeps the least that recovers enough of its attention.

    shares 0, 0.3, 1     [ sinks ] [ window ]              if that is enough
                         [ sinks ] [ best 30 % ] [ window ]         else this
                         [ everything ]                             else this

FastGen (arXiv:2310.01801): what a head attends to in a prompt says which rule serves it, and the
cheapest that recovers `recovery` of its attention is taken. The rules here are sinks and window,
alone or with the best tokens by the policy's scorer, and everything; punctuation and local shares,
which the paper has too, are not among them. The lengths are solved as those of adaptive heads are
(`adaptive_heads/`), and the budget is an upper limit of what the heads of a layer keep on average.

    vllm serve MODEL --kv-policy fastgen --kv-policy-args '{"recovery": 0.9}'
    vllm serve MODEL --kv-policy fastgen --kv-budget 30%

There is no limit unless you give a budget: flat attention keeps everything. Where the heads of a
layer ask for more than it, the longest are lowered to one level. The paper looks at the attention
of all the prompt's queries; here it is the scorer's, whose scores must not be negative
(`future_attention`, `observation_window`). `expected_attention` leaves sinks out of its softmax, so
it takes `shares` that begin above 0. Cost and limits are those of adaptive heads (`adakv`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vllm_pyramid.methods.adaptive_heads import SolvedHeads
from vllm_pyramid.plan import DeferredPlan
from vllm_pyramid.policy.allocator import Integers

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy


class RecoveringHeads(SolvedHeads):
    """Give each KV head the first of some lengths whose tokens hold enough of its scores.

    Attributes:
        recovery: share of a head's scores before the window that its tokens must hold, sinks
            included.
        shares: of the tokens between sinks and window, increasing from 0 or more to 1: how many of
            the best a head may keep; rounded up.
    """

    sets_total: ClassVar[bool] = True
    kind: Literal["recovering"] = "recovering"
    recovery: float = Field(default=0.95, gt=0.0, le=1.0)
    shares: tuple[float, ...] = (0.0, 0.3, 1.0)

    @model_validator(mode="after")
    def _check_shares(self) -> RecoveringHeads:
        rises = all(below < above for below, above in pairwise(self.shares))
        if not self.shares or self.shares[0] < 0 or self.shares[-1] != 1 or not rises:
            raise ValueError(
                f"heads.shares must increase from 0 or more to 1, which stands for all tokens, not "
                f"{list(self.shares)}"
            )
        return self

    def counts(self, capacity: int) -> list[int]:
        """Return what a head may keep of `capacity` tokens between sinks and window."""
        # A share such as 0.3 of 10 is no more than 3 tokens.
        return [min(math.ceil(share * capacity - 1e-9), capacity) for share in self.shares]

    def evidence(self, scores: torch.Tensor, sinks: int) -> torch.Tensor:
        """Return the scores; tokens scored -inf, and columns without a token, count as 0."""
        return scores.clamp(min=0.0)

    def measures(self, scores: torch.Tensor, plan: DeferredPlan, sinks: int) -> torch.Tensor:
        """Return the least of the counts that recovers enough, `[G]`."""
        from vllm_pyramid.methods.adaptive_heads.lengths import least_count

        return least_count(scores, self.counts(plan.capacity), self.recovery, sinks=sinks)

    def allocate(self, measured: Integers, plan: DeferredPlan) -> Integers:
        """Return what was asked for; a layer above its limit lowers its longest heads alike."""
        asked = int(measured.sum())
        total = min(max(asked, plan.min_mean * len(measured)), plan.mean * len(measured))
        if total > asked:  # shortest heads are raised alike
            return plan.capacity - lowered(
                plan.capacity - measured, plan.capacity * len(measured) - total
            )
        return lowered(measured, total)

    def check(self, policy: Policy) -> None:
        """Refuse scorers of whose sums a share means nothing, and all that adaptive heads do."""
        super().check(policy)
        scorer = policy.scorer
        if not (scorer.attention_mass or scorer.not_negative):
            raise ValueError(
                f"policy {policy.name!r} has recovering heads, which take shares of a head's "
                f"scores, and those of its scorer {scorer.kind!r} may be negative: choose "
                "future_attention or observation_window"
            )
        if not scorer.scores_sinks and policy.sinks and self.shares[0] == 0:
            raise ValueError(
                f"policy {policy.name!r} has recovering heads, of which the first of heads.shares "
                f"is sinks and window alone, and its scorer {scorer.kind!r} does not say what "
                "sinks are worth, so no head would keep that: choose future_attention or "
                "observation_window, or let heads.shares begin above 0"
            )


def lowered(lengths: Integers, total: int) -> Integers:
    """Return `[G]` lengths with the largest lowered to one level, so that the sum is `total`.

    What a level leaves goes to the first.
    """
    low, high = 0, int(lengths.max())
    while low < high:  # the highest level whose sum is at most `total`
        level = (low + high + 1) // 2
        low, high = (level, high) if np.minimum(lengths, level).sum() <= total else (low, level - 1)
    result: Integers = np.minimum(lengths, low)
    above = np.flatnonzero(lengths > low)
    result[above[: total - int(result.sum())]] += 1
    return result
