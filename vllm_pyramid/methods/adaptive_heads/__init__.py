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

- **Lengths.** Each head's part is rounded up to its blocks, which hold its next best tokens. Of
  equal scores the lower positions stay, then those of the lower heads. A response's
  `solved_tokens` has the solved lengths, `kept_tokens` those in whole blocks.
- **Scores must mean the same in all heads.** Shares of a softmax times the norm of V do; norms of
  keys do not. Scorers must look at each KV head by itself: `observation_window`, and those that say
  `in_parts`. Without window and sinks the tokens are those of kvpress's `AdaKVPress`.
- **Cost.** As streaming heads, and at the prompt's end a joint top-k of each layer. Scores of one
  layer wait until its last head has attended: 4 bytes a prompt token and head; 24 are reserved.
- **Limits.** On CPUs alone, and those of streaming heads: docs/limits.md#of-this-version. The
  preset's scorer does not look for what the prompt's end attends to, so it loses facts that `auto`
  keeps: lab/results/single-heads.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.streaming_heads.split import HeadLengths
from vllm_pyramid.plan import Budget, Plan
from vllm_pyramid.policy.allocator import open_plan
from vllm_pyramid.policy.capabilities import Feature, Unsupported

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks


class AdaptiveHeads(HeadLengths):
    """Divide each layer's budget among its KV heads by one choice of the best tokens of all.

    Attributes:
        alpha: the share of its budget beyond sinks and window that each head keeps whatever the
            other heads' scores are, rounded down; at least one token, unless it is 0.
    """

    defers: ClassVar[bool] = True
    kind: Literal["adaptive"] = "adaptive"
    alpha: float = Field(default=0.2, ge=0.0, le=1.0)

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> Plan:
        """Return an open plan, where the prompt may be shortened: every layer keeps the budget."""
        lengths = prompt_len, num_lanes, block_size, budget
        return open_plan(policy, *lengths, sets_total=False, safe=self._safe)

    def _safe(self, mean: int) -> int:
        """Return what each head keeps at least, of `mean` tokens beyond sinks and window."""
        return max(int(self.alpha * mean), 1) if self.alpha else 0

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks:
        from vllm_pyramid.methods.adaptive_heads.worker import HeadSolver

        return HeadSolver(policy, context)

    def check(self, policy: Policy) -> None:
        self.check_parts(policy)
        self.check_scorer(policy)
        ignored = "selector.recent" if policy.selector.recent_share else None
        if policy.chunk.tokens:
            ignored = "chunk.tokens"
        if ignored is not None:
            raise ValueError(
                f"policy {policy.name!r} has {self.kind} heads, whose lengths are solved once, "
                f"from the scores of a whole prompt: leave {ignored} out"
            )

    @property
    def unsupported(self) -> Unsupported:
        untried = "it was not tried with lengths that are solved"
        return {
            Feature.PREFIX_CACHING: (
                "the lengths of its heads follow from a prompt's scores, so no block is known "
                "before to stay untouched"
            ),
            Feature.KV_KEEP: (
                "its lengths are solved from the scores of a whole prompt, those of the spans "
                "among them"
            ),
            Feature.TENSOR_PARALLEL: (
                "ranks share block tables, and each would solve other lengths for the heads at the "
                "same place"
            ),
            Feature.PIPELINE: (
                "the scheduler hears the last stage, which does not know the lengths of the others"
            ),
            Feature.CUDA: "solving would wait for the device in every layer",
            Feature.DATA_PARALLEL: untried,
            Feature.DRAFTS: untried,
            Feature.TRACE: untried,
        }
