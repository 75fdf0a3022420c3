# SPDX-License-Identifier: Apache-2.0
"""Shares of KV heads: important heads keep more of a prompt, by numbers that are fixed for a model.

    kept of a head    B (1 - 1 / beta)  +  (B / beta) * m * s_h / sum(s)     and sinks, window

HeadKV (arXiv:2410.19258): every head gives 1 / beta of its budget to a pool, and the pool is
divided in proportion to what a probe found of the heads (retrieval and reasoning). Which tokens a
head keeps is the policy's scorer's choice, inside that head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_pyramid.methods.curves import SharesAllocator
from vllm_pyramid.methods.streaming_heads.score_files import Scores, check_scores, of_kv_heads
from vllm_pyramid.methods.streaming_heads.split import SplitHeads, with_scores
from vllm_pyramid.plan import Budget, EvictionPoint, Plan, RetentionPlan

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.policy.policy import Policy

logger = logging.getLogger(f"vllm.{__name__}")


class HeadShares(SplitHeads):
    """Give each KV head of each layer a length of its own, by its importance.

    Attributes:
        scores: `[L][G]` numbers of the KV heads, at least 0, or `[L][H]` of the query heads, whose
            mean is their KV head's. In a preset and on the command line: HeadKV's `.json` file, or
            a folder of `calibrate --heads`. None: only plans can be made, with equal lengths.
        beta: every head gives 1 / beta of its budget beyond sinks and window to the pool; 1: all
            of it, so that a head of importance 0 keeps no more than these.
    """

    scored: ClassVar[str] = "scores"
    on_cuda: ClassVar[bool] = True
    kind: Literal["shares"] = "shares"
    scores: Scores | None = None
    beta: float = Field(default=1.2, ge=1.0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, data: Any) -> Any:
        """Replace the name of a file by what it holds."""
        return with_scores(data, "scores")[0]

    @model_validator(mode="after")
    def _check_scores(self) -> HeadShares:
        if self.scores is not None:
            check_scores("heads.scores", self.scores)
            numbers = [number for row in self.scores for number in row]
            if min(numbers) < 0 or not any(numbers):
                raise ValueError("heads.scores must be at least 0, and not all 0")
        return self

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> Plan:
        """Plan the prompt's end: the budget's mean over all heads, as the scores divide it.

        A head whose share is longer than the prompt keeps the prompt; the others share the rest. So
        it is at points inside the prompt, with the budget of these. A lane of several ranks is as
        long as the longest of its heads.
        """
        ranks = 1 if self.scores is None else self.ranks
        num_heads = num_lanes * ranks
        plan = self._allocator(num_heads).plan(policy, prompt_len, num_heads, block_size, budget)
        plan = policy.chunk.plan(policy, plan)
        if ranks == 1:
            return plan
        assert isinstance(plan, RetentionPlan), "no lengths are solved"
        *inner, end = plan.points
        of_lanes = RetentionPlan((self._of_lanes(end, policy.fill_blocks),))
        if not of_lanes.evicts:
            return of_lanes
        return of_lanes.with_inner([self._of_lanes(point, fill_blocks=True) for point in inner])

    def inner_ends(
        self,
        policy: Policy,
        computed: Sequence[int],
        num_heads: int,
        block_size: int,
        budget: Budget,
    ) -> list[EvictionPoint]:
        """Divide the budget of each point as that of the prompt's end."""
        return self._allocator(num_heads).ends(policy, computed, num_heads, block_size, budget)

    def _allocator(self, num_heads: int) -> SharesAllocator:
        shares = (1.0,) * num_heads
        if self.scores is not None:
            found = of_kv_heads(self.scores, num_heads // len(self.scores), mean=True)
            shares = tuple(found.ravel().tolist())
        return SharesAllocator(shares=shares, floor=1 - 1 / self.beta)

    def _of_lanes(self, point: EvictionPoint, fill_blocks: bool) -> EvictionPoint:
        """Return a point of all ranks' heads as one of the lanes that they share."""
        keep, front, recent = (
            self.by_rank(of_heads).max(axis=1).ravel()
            for of_heads in (point.keep, point.front, point.recent)
        )
        mean = -(-int(keep.sum()) // len(keep))
        of_lanes = point.computed, point.block_size, mean, keep, fill_blocks
        return EvictionPoint.of(*of_lanes, front=front, recent=recent)

    def on_ranks(self, policy: Policy, ranks: int, num_kv_heads: int) -> HeadShares:
        """Return this part for several ranks, and log what their shared tables cost."""
        found = super().on_ranks(policy, ranks, num_kv_heads)
        if ranks > 1 and self.scores is not None:
            scores = of_kv_heads(self.scores, num_kv_heads, mean=True).ravel()
            longest = found.by_rank(scores).max(axis=1).mean() / scores.mean()
            logger.info(
                "kv-policy %s: %d tensor-parallel ranks share block tables, each as long as the "
                "longest head at its place of all ranks: %.2f times the budget",
                *(policy.name, ranks, 1 + (longest - 1) / self.beta),
            )
        return found

    # Answers of a part --------------------------------------------------------------------------

    def check(self, policy: Policy) -> None:
        """Refuse parts that look across heads, or were not tried with lengths of heads."""
        self.check_parts(policy)
        self.check_scorer(policy)

    def prepare_args(self, policy: Policy, args: EngineArgs) -> None:
        """Refuse to serve without scores."""
        if self.scores is None:
            raise ValueError(
                f"policy {policy.name!r} does not know how important the heads are: take the file "
                "that HeadKV publishes for the model, or measure them with vllm-pyramid calibrate "
                "--heads --model MODEL -o FOLDER, and add --kv-policy-args "
                '\'{"scores": "FILE.json or FOLDER"}\''
            )
