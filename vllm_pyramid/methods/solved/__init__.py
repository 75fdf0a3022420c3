# SPDX-License-Identifier: Apache-2.0
"""Allocators whose lengths depend on the prompt's attention: solved at the end of its prefill.

What happens where (S prompts end in a step, L layers):

    every layer      evidence(scores)                  [S, ...]   from this rank's KV heads
    after the last   summed over the ranks             [L, S, ...]
    a request        measures(evidence)                [L]        on the device
    a step           all measures are read back        [S, L]     the only copy to the host
    a request        allocate(measures, B, C)          [L]        whole numbers

Notation as in `allocator.py`: m layers, B the mean number of tokens beyond window and sinks, C how
many such tokens the prompt has. Torch is only imported where a worker calls these.

    --kv-policy xkv --kv-policy-args '{"retention": 0.9}'

- **Plans.** Only the total is known before a prompt has been processed. Each prompt is solved on
  its own, again if it is preempted. A response's `solved_tokens` has the lengths, whose sum is the
  budget times the number of layers, and `kept_tokens` those in whole blocks.
- **Cost.** Once a prompt: a top-N over the scores of all layers, and a number a layer read back.
  Until the last layer has attended, scores take 4 bytes a KV head, layer and prompt token, outside
  the memory that vLLM measures.
- **`global`**: layer l keeps as many as lie in it of the B m greatest numbers
  `w(l, i) / sum_i w(l, i)`, w(l, i) being token i's score, mean over the KV heads; of equal ones
  the lower layer's first. No other lengths of the total have a greater mean retention. Where XKV
  adds one token a step, one top-N gives the same lengths, and no mini-prefill is needed. With
  `retention` the budget is a limit, 100 % by default, and `kv_budget` of a response is the mean.
  The preset pools over 7 positions, its paper's width.
- **Needs** a scorer of attention (`observation_window`, `future_attention`), of all layers before
  the first is shortened. Not with evictions inside the prompt.

Calibrated lengths are known beforehand. This averages each layer's share over your prompts and
writes a preset with the allocator `shares`, for models with as many layers:

    vllm-pyramid calibrate --model MODEL --prompts FILE.jsonl --kv-budget 512 -o budgets.yaml
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vllm_pyramid.plan import Budget, Plan
from vllm_pyramid.policy.allocator import Allocator, Integers, Reals, open_plan
from vllm_pyramid.policy.capabilities import Feature, Unsupported

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import SchedulerHooks, WorkerContext, WorkerHooks


class SolvingAllocator(Allocator):
    """Base of the data-dependent allocators. All methods are pure functions.

    Attributes:
        sample_first: number of requests of each application that are solved; later ones get the
            average of those solved so far.
        sample_share: share of the requests of each application that are solved, above 0, below 1.

    Class attributes:
        sees_tokens: `evidence` has a number for each token, not only one for each layer.
    """

    sample_first: int | None = Field(default=None, ge=1)
    sample_share: float | None = Field(default=None, gt=0.0, lt=1.0)

    defers: ClassVar[bool] = True
    sees_tokens: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_sampling(self) -> SolvingAllocator:
        if self.sample_first is not None and self.sample_share is not None:
            raise ValueError("sample_first and sample_share exclude each other: give one of them")
        if self.samples and self.sets_total:
            raise ValueError(
                "a set retention has no set total that sampled shares could be of: leave the "
                "retention or the sampling out"
            )
        return self

    @property
    def samples(self) -> bool:
        return self.sample_first is not None or self.sample_share is not None

    @property
    def sets_total(self) -> bool:
        """Return whether the total follows from the prompt, too; the budget is then a limit."""
        return False

    @property
    def unsupported(self) -> Unsupported:
        why = "its lengths are solved from the scores of a whole prompt"
        return {
            Feature.KV_TURNS: why,
            Feature.KV_KEEP: f"{why}, those of the spans among them",
            Feature.PIPELINE: (
                "the solver needs the scores of all layers, and a stage has its own",
                "run `vllm-pyramid calibrate` without the flag and serve the policy that it "
                "writes, or choose pyramidkv",
            ),
        }

    def check(self, policy: Policy) -> None:
        if not policy.scorer.attention_mass:
            raise ValueError(
                f"policy {policy.name!r} has the allocator {self.kind!r}, which takes the lengths "
                f"from attention scores, but its scorer {policy.scorer.kind!r} has none: choose "
                "the scorer observation_window"
            )
        ignored = "selector.recent" if policy.selector.recent_share else None
        if policy.schedule.every:
            ignored = f"the schedule {policy.schedule.kind!r}"
        if ignored is not None:
            raise ValueError(
                f"policy {policy.name!r} has the allocator {self.kind!r}, which solves the lengths "
                f"once, at the prompt's end: {ignored} would have no effect; leave it out"
            )

    def check_calibration(self, policy: Policy) -> None:
        if self.samples:
            raise ValueError(
                f"policy {policy.name!r} solves only a sample of the prompts (sample_first or "
                "sample_share), and calibration needs all of them: leave that out"
            )
        if self.sets_total:
            raise ValueError(
                "a set retention has no set total that shares could be of: leave it out, and give "
                "a --kv-budget"
            )

    def default_budget(self) -> Budget | None:
        """Return 100 % where the total is found: the budget is then an upper limit."""
        return Budget.parse("100%") if self.sets_total else None

    def plan(
        self, policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
    ) -> Plan:
        """Return an open plan, where the prompt may be shortened."""
        lengths = prompt_len, num_layers, block_size, budget
        return open_plan(policy, *lengths, sets_total=self.sets_total)

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.solved.worker import LayerSolver

        return LayerSolver(policy, self, context)

    def scheduler_hooks(self, policy: Policy, num_layers: int) -> SchedulerHooks | None:
        from vllm_pyramid.methods.solved.scheduler import SampledShares

        return SampledShares(self, num_layers) if self.samples else None

    @abstractmethod
    def evidence(self, scores: torch.Tensor) -> torch.Tensor:
        """Return what a layer says, summed over this rank's KV heads: `[S, ...]` floating point.

        `scores` are `[S, G, n]` of `window_scores`, -inf behind a prompt's context.
        """

    @abstractmethod
    def measures(
        self, evidence: torch.Tensor, mean: int, capacity: int, sinks: int, least: int
    ) -> torch.Tensor:
        """Return one number a layer, on the device: `[m]`.

        `evidence` is `[m, ...]` of one request over all heads, cut to the request's own context
        tokens, of which the first `sinks` are kept anyway. B is at least `least`, if `sets_total`.
        """

    @abstractmethod
    def allocate(self, measures: Reals, mean: int, capacity: int) -> Integers:
        """Return tokens per layer, `[m]` int64 in [0, C]: B * m, or fewer if `sets_total`."""


class GlobalAllocator(SolvingAllocator):
    """XKV: share the budget so that all layers together keep the most attention.

    Finds the lengths with the greatest mean retention R over all layers for a total
    (arXiv:2412.05896, Eq. 17), or, with `retention`, the least total whose mean R reaches it
    (Eq. 18); the budget is then an upper limit.

    Attributes:
        retention: share of the layers' scores that is to be kept on average, or None.
    """

    sees_tokens: ClassVar[bool] = True
    kind: Literal["global"] = "global"
    retention: float | None = Field(default=None, gt=0.0, le=1.0)

    @property
    def sets_total(self) -> bool:
        return self.retention is not None

    def evidence(self, scores: torch.Tensor) -> torch.Tensor:
        from vllm_pyramid.methods.solved.worker import sum_of_heads

        return sum_of_heads(scores)

    def measures(
        self, evidence: torch.Tensor, mean: int, capacity: int, sinks: int, least: int
    ) -> torch.Tensor:
        from vllm_pyramid.methods.solved.worker import best_lengths, least_lengths

        layers = evidence.shape[0]
        if self.retention is None:
            return best_lengths(evidence, mean * layers, sinks=sinks)
        return least_lengths(
            evidence, self.retention, limit=mean * layers, at_least=least * layers, sinks=sinks
        )

    def allocate(self, measures: Reals, mean: int, capacity: int) -> Integers:
        return measures.astype(np.int64)  # they are the lengths
