# SPDX-License-Identifier: Apache-2.0
"""Adaptive heads: the KV heads of a layer share its budget by what each prompt's scores say.

    scores of a layer's heads    [ head 0 ........... ][ head 1 ........... ] ...
    safe                         the best int(alpha * B) of each head
    the rest                     the best of all heads together
    a head keeps                 what is its own of these, its sinks and its window

AdaKV (arXiv:2407.11550): a layer of G heads keeps exactly G * B tokens beyond sinks and windows, as
with equal lengths, and among these the tokens with the highest scores of all heads. Each head keeps
its `alpha` at least. Which tokens a head keeps then are its best by the policy's scorer, so both
choices are one.

The lengths are known when a layer has attended at the prompt's end: the worker solves them layer by
layer (`worker.py`), and the scheduler frees blocks by what it reports, as it does for allocators
that solve (`methods/solved/`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.streaming_heads.split import HeadLengths
from vllm_pyramid.plan import Budget, DeferredPlan, Plan, RetentionPlan
from vllm_pyramid.policy.allocator import point_of_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks


class AdaptiveHeads(HeadLengths):
    """Divide each layer's budget among its KV heads by one choice of the best tokens of all.

    Attributes:
        alpha: the share of its budget beyond sinks and window that each head keeps whatever the
            other heads' scores are, rounded down; at least one token, unless it is 0.
    """

    solves: ClassVar[bool] = True
    kind: Literal["adaptive"] = "adaptive"
    alpha: float = Field(default=0.2, ge=0.0, le=1.0)

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> Plan:
        """Return an open plan, where the prompt may be shortened: every layer keeps the budget."""
        mean = budget.tokens_for(prompt_len, policy.min_budget)
        fixed = policy.window + policy.sinks
        if mean >= prompt_len:
            end = point_of_tokens(policy, None, prompt_len, num_lanes, block_size, prompt_len)
            return RetentionPlan((end,))
        assert fixed < mean, (fixed, mean, "the budget was not checked")
        safe = max(int(self.alpha * (mean - fixed)), 1) if self.alpha else 0
        return DeferredPlan(
            prompt_len,
            block_size,
            num_lanes,
            mean,
            floor=fixed,
            exact=True,
            min_tokens=mean,
            fill_blocks=policy.fill_blocks,
            safe=safe,
        )

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks:
        from vllm_pyramid.methods.adaptive_heads.worker import HeadSolver

        return HeadSolver(policy, context)

    # Answers of a part --------------------------------------------------------------------------

    def check(self, policy: Policy) -> None:
        """Refuse parts that look across heads, or were not tried with lengths of heads."""
        self.check_parts(policy)
        self.check_scorer(policy)
        ignored = "selector.recent" if policy.selector.recent_share else None
        if policy.chunk.tokens:
            ignored = "chunk.tokens"
        if ignored is not None:
            raise ValueError(
                f"policy {policy.name!r} has adaptive heads, whose lengths are solved once, from "
                f"the scores of a whole prompt: leave {ignored} out"
            )

    def why_not_shareable(self, policy: Policy) -> str | None:
        """Refuse prefix caching, and with it sessions and the host cache."""
        return (
            "the lengths of its heads follow from a prompt's scores, so no block is known before "
            "to stay untouched, and blocks of single heads are not copied"
        )

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        """Refuse ranks and devices where the solved lengths would not reach all who need them."""
        from vllm.platforms import current_platform

        parallel, reason = config.parallel_config, None
        if parallel.tensor_parallel_size > 1:
            reason = (
                "--tensor-parallel-size: ranks share block tables, and each would solve other "
                "lengths for the heads at the same place"
            )
        elif parallel.pipeline_parallel_size > 1:
            reason = (
                "--pipeline-parallel-size: the scheduler hears the last stage, which does not "
                "know the lengths of the others"
            )
        elif parallel.data_parallel_size > 1:
            reason = "--data-parallel-size, with which they were not tried"
        elif config.speculative_config is not None:
            reason = "--speculative-config, with which they were not tried"
        elif isinstance(given := config.additional_config, dict) and given.get("kv_trace"):
            reason = "--kv-trace, with which they were not tried"
        elif current_platform.device_type != "cpu":
            reason = "CUDA devices, where solving would wait for the device in every layer"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} has adaptive heads, which do not go with {reason}; leave "
                "it out, or choose another policy"
            )
        super().check_config(policy, config)
