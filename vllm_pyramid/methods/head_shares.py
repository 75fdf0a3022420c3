# SPDX-License-Identifier: Apache-2.0
"""Shares of KV heads: important heads keep more of a prompt, by numbers that are fixed for a model.

    kept of a head    B (1 - 1 / beta)  +  (B / beta) * m * s_h / sum(s)     and sinks, window

HeadKV (arXiv:2410.19258): every head gives 1 / beta of its budget to a pool, and the pool is
divided in proportion to what a probe found of the heads (retrieval and reasoning). Which tokens a
head keeps is the policy's scorer's choice, inside that head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_pyramid.methods.curves import SharesAllocator
from vllm_pyramid.methods.observation_window import ObservationWindowScorer
from vllm_pyramid.methods.streaming_heads.score_files import Scores, check_scores, of_kv_heads
from vllm_pyramid.methods.streaming_heads.split import SplitHeads, with_scores
from vllm_pyramid.plan import Budget, Plan

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.policy.policy import Policy


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

        A head whose share is longer than the prompt keeps the prompt; the others share the rest.
        """
        shares = (1.0,) * num_lanes
        if self.scores is not None:
            found = of_kv_heads(self.scores, num_lanes // len(self.scores), mean=True)
            shares = tuple(found.ravel().tolist())
        allocator = SharesAllocator(shares=shares, floor=1 - 1 / self.beta)
        return allocator.plan(policy, prompt_len, num_lanes, block_size, budget)

    # Answers of a part --------------------------------------------------------------------------

    def check(self, policy: Policy) -> None:
        """Refuse parts that look across heads, or were not tried with lengths of heads."""
        self.check_parts(policy)
        scorer = policy.scorer
        reason = None
        if not scorer.evicts:
            reason = "ranks nothing"
        elif scorer.works_in_every_step or scorer.gathers(policy):
            reason = "gathers numbers in every step, which have one place for each layer"
        elif scorer.asks_ranks:
            reason = "looks at all KV heads of a layer together"
        elif not (scorer.in_parts or isinstance(scorer, ObservationWindowScorer)):
            reason = "does not say that it looks at each KV head by itself (`in_parts`)"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} gives each KV head a length of its own (heads), and its "
                f"scorer {scorer.kind!r} {reason}: choose another, such as observation_window"
            )
        if policy.chunk.tokens:
            raise ValueError(
                f"policy {policy.name!r} has shares of heads, which evict at the prompt's end "
                "alone so far: leave chunk out"
            )

    def why_not_shareable(self, policy: Policy) -> str | None:
        """Refuse prefix caching, and with it sessions and the host cache."""
        return "bundles of blocks whose lengths are those of single heads were not tried"

    def prepare_args(self, policy: Policy, args: EngineArgs) -> None:
        """Refuse to serve without scores."""
        if self.scores is None:
            raise ValueError(
                f"policy {policy.name!r} does not know how important the heads are: take the file "
                "that HeadKV publishes for the model, or measure them with vllm-pyramid calibrate "
                "--heads --model MODEL -o FOLDER, and add --kv-policy-args "
                '\'{"scores": "FILE.json or FOLDER"}\''
            )
