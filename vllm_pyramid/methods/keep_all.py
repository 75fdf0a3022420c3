# SPDX-License-Identifier: Apache-2.0
"""Keep every token: the baseline `full`, and `kcache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    from vllm_pyramid.plan import Budget
    from vllm_pyramid.policy.policy import Policy


class NoScorer(Scorer):
    """Keep every token: what `full` and `kcache` have in place of a scorer."""

    evicts: ClassVar[bool] = False
    kind: Literal["none"] = "none"

    def check_budget(self, policy: Policy, budget: Budget) -> None:
        if budget.percent != 100:
            reads = "; what it reads is attend.budget" if policy.attend.selects else ""
            raise ValueError(
                f"policy {policy.name!r} keeps every token, so a budget of {budget} has no effect: "
                f"leave the budget out, or choose a policy that evicts{reads}"
            )
