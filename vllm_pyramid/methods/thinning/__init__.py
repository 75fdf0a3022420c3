# SPDX-License-Identifier: Apache-2.0
"""Tokens leave the forward pass between layers (PyramidInfer, arXiv:2405.12532, section 4).

A piece of a prompt is its recent sequence, the last tokens, and its context, the tokens before. The
layers thin the context on the way up, so what a layer keeps is also all that the next one computes:

    layer 0   [ context                    | recent ]      r(0) = 1: nothing leaves
    layer 2   [ context      ]             | recent ]      keeps int(context * r(2))
    layer 4   [ context  ]                 | recent ]      keeps int(that * r(4))

Four parts that only go together: the allocator `decay` (lengths), the scorer `recent_ensemble`, the
selector `top_k_shared`, and, if generated tokens are to be thinned too, the schedule
`thin_generated`. `step.py` and `worker.py` do the work in a step, `generated.py` what is generated.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.thinning.plans import later_point, thinning_plan
from vllm_pyramid.plan import Budget, EvictionPoint, IntArray, Plan
from vllm_pyramid.policy.allocator import Allocator
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.schedules import Schedule
from vllm_pyramid.policy.selectors import Selector

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks

Integers = npt.NDArray[np.int64]
_STEPS = 40  # of the bisection: finer than a token in any prompt


class RecentEnsembleScorer(AccumulatingScorer):
    """PyramidInfer: keep the context tokens to which the recent sequence attends.

    Averages the softmax over all keys over the recent queries, later ones weighing more, and over
    all query heads (arXiv:2405.12532, section 4): one score a token, so that a layer keeps one set
    for all its heads.

    While a prompt is processed, it is taken from the piece. It is gathered in every step only with
    the schedule `thin_generated`, of generated tokens, from the queries of the sliding window.

    Attributes:
        distance_weight: weight of the last query of a piece's recent sequence; they rise linearly
            from 1 at the first. The queries of the sliding window weigh alike.
    """

    kind: Literal["recent_ensemble"] = "recent_ensemble"
    mass_kind: ClassVar[str | None] = "sum"
    distance_weight: float = Field(default=1.2, gt=0)

    @property
    def works_in_every_step(self) -> bool:
        """Return False: the schedule says whether steps that generate gather."""
        return False

    @property
    def works_during_prompt(self) -> bool:
        return True

    def gathers(self, policy: Policy) -> bool:
        """Return whether generated tokens are thinned, for which their attention is gathered."""
        return policy.schedule.every > 0

    def check(self, policy: Policy) -> None:
        parts = (policy.scorer, policy.allocator, policy.selector)
        wanted = (RecentEnsembleScorer, DecayAllocator, TopKSharedSelector)
        if not all(isinstance(part, cls) for part, cls in zip(parts, wanted, strict=True)):
            raise _only_together(policy)
        if policy.schedule.every and not isinstance(policy.schedule, ThinGeneratedSchedule):
            raise ValueError(
                f"policy {policy.name!r} thins prompts between layers; what is generated is "
                f"thinned by the schedule thin_generated, not by {policy.schedule.kind!r}"
            )

    @property
    def unsupported(self) -> Unsupported:
        return {
            Feature.PREFIX_CACHING: (
                "tokens leave between the layers while a prompt is processed, so the KV of a "
                "prefix depends on the budget"
            )
        }

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        if not isinstance(policy.schedule, ThinGeneratedSchedule):
            return None
        from vllm_pyramid.methods.thinning.generated import GeneratedMass

        return GeneratedMass(policy, self, policy.schedule, context)


def _only_together(policy: Policy) -> ValueError:
    return ValueError(
        f"policy {policy.name!r}: the scorer recent_ensemble, the allocator decay and the selector "
        "top_k_shared thin prompts between layers and only go together, not with "
        f"{policy.scorer.kind!r}, {policy.allocator.kind!r} and {policy.selector.kind!r}"
    )


class DecayAllocator(Allocator):
    """Each layer keeps a share of the context that reaches it; the shares fall with depth.

    The share of layer l of m is `r(l) = decay_ratio + (1 - decay_ratio) * f(l / m)`; only every
    `interval`-th layer thins. Defaults are those of the authors' repository for Llama 2 13B. The
    lengths follow from the schedule, not from a budget; a budget is an upper limit, for which the
    shares are lowered (`DecayAllocator.lengths`).

    Attributes:
        decay_curve: f falls from 1 as half a `cosine` or is `linear`.
        decay_ratio: the share towards which r(l) falls.
        interval: layers 0, interval, 2 * interval, ... thin.
        min_context: context tokens that every layer keeps, if the context has them.
        recent_ratio: the recent sequence's share of a piece.
        piece_tokens: tokens of a piece. Longer prompts are thinned piece by piece, each as a prompt
            of its own that also attends to what is left of the pieces before.
    """

    thins_prompts: ClassVar[bool] = True
    kind: Literal["decay"] = "decay"
    decay_curve: Literal["cosine", "linear"] = "cosine"
    decay_ratio: float = Field(default=0.8, ge=0, le=1)
    interval: int = Field(default=2, ge=1)
    min_context: int = Field(default=64, ge=1)
    recent_ratio: float = Field(default=0.2, gt=0, le=1)
    piece_tokens: int = Field(default=2048, ge=2)

    @property
    def of_graph(self) -> Any:
        return self.kind

    def check(self, policy: Policy) -> None:
        if not isinstance(policy.scorer, RecentEnsembleScorer):
            raise _only_together(policy)
        if policy.window or policy.sinks > self.min_context:
            raise ValueError(
                f"policy {policy.name!r} thins prompts between layers: `window` must be 0 (recent "
                f"tokens are the recent_ratio), not {policy.window}, and `sinks` at most the "
                f"min_context of {self.min_context}, not {policy.sinks}"
            )

    def check_budget(self, policy: Policy, budget: Budget) -> None:
        if budget.percent is None:
            raise ValueError(
                f"policy {policy.name!r} keeps shares of each piece of a prompt, so its budget, an "
                f"upper limit, is a percentage such as 50%, not {budget} tokens"
            )

    @property
    def unsupported(self) -> Unsupported:
        drops = "it drops tokens between layers"
        return {
            Feature.LORA: f"{drops}, and adapters are chosen by a token's place in the step",
            Feature.OTHER_LAYERS: f"{drops}, and layers with windows or states need all of them",
            Feature.PROMPT_LOGPROBS: f"{drops}, before those of the prompt have any",
        }

    def prepare_args(self, policy: Policy, args: EngineArgs) -> None:
        from vllm_pyramid.methods.thinning.engine import check_thinning_args

        check_thinning_args(args, policy, self)

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        from vllm_pyramid.methods.thinning.engine import check_thinning_config

        check_thinning_config(config, policy, self)

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.thinning.worker import Thinner

        assert isinstance(policy.scorer, RecentEnsembleScorer)
        return Thinner(policy, policy.scorer, self, context)

    def plan(
        self, policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
    ) -> Plan:
        plan = thinning_plan(
            self,
            prompt_len,
            num_layers,
            block_size,
            budget=budget,
            sinks=policy.sinks,
            least=budget.min_tokens or 0,
            fill_blocks=policy.fill_blocks,
        )
        if not policy.schedule.every:
            return plan
        return plan.repeated(policy.schedule.every, partial(later_point, policy, plan.end))

    def recent(self, tokens: int) -> int:
        """Return the recent tokens of a piece of `tokens`; at least one, its last."""
        return min(tokens, max(1, int(tokens * self.recent_ratio)))

    def contexts(
        self, context: int, num_layers: int, decay_ratio: float, least: int = 0
    ) -> Integers:
        """Return context tokens that each layer keeps, `[num_layers]`, falling with depth."""
        kept = []
        floor = min(context, max(self.min_context, least))
        rest = 1 - decay_ratio
        for fall in _falls(self.decay_curve, num_layers, self.interval):
            context = max(floor, int(context * (decay_ratio + rest * fall)))
            kept.append(context)
        return np.repeat(np.array(kept, np.int64), self.interval)[:num_layers]

    def lengths(self, tokens: int, num_layers: int, share: float = 1.0, least: int = 0) -> Integers:
        """Return tokens that each layer keeps of a piece, recent ones included: `[num_layers]`.

        At most `share` of `tokens * num_layers` is kept, by a lower decay ratio, unless the floor
        (at `least` so many context tokens) and the recent sequence alone are more.
        """
        recent = self.recent(tokens)
        contexts = partial(self.contexts, tokens - recent, num_layers, least=least - recent)
        kept = recent + contexts(self.decay_ratio)
        most = math.floor(share * tokens * num_layers)
        if int(kept.sum()) <= most:
            return kept
        low, high = 0.0, self.decay_ratio
        for _ in range(_STEPS):
            middle = (low + high) / 2
            total = recent * num_layers + contexts(middle).sum()
            low, high = (middle, high) if total <= most else (low, middle)
        return recent + contexts(low)


@lru_cache(maxsize=16)
def _falls(decay_curve: str, num_layers: int, interval: int) -> list[float]:
    depths = [layer / num_layers for layer in range(0, num_layers, interval)]
    if decay_curve == "linear":
        return [1 - depth for depth in depths]
    return [(math.cos(math.pi * depth) + 1) / 2 for depth in depths]


class TopKSharedSelector(Selector):
    """Keep the best-scored tokens, one set for all heads; ties go to the lower position."""

    kind: Literal["top_k_shared"] = "top_k_shared"

    def check(self, policy: Policy) -> None:
        if not isinstance(policy.scorer, RecentEnsembleScorer):
            raise _only_together(policy)

    def kept(self, scores: torch.Tensor, batch: EvictionBatch) -> torch.Tensor:
        return batch.call.ops.select(
            batch.protect(scores), batch.lens, batch.keeps, window=0, max_keep=batch.max_keep
        )


class ThinGeneratedSchedule(Schedule):
    """Thin generated tokens that have left a sliding recent window (PyramidInfer, section 4).

        held    [ the prompt's | kept of groups that left | recent: `gen_window` ]
        leaves                                 [ group ]      every `gen_interval` tokens

    Of all the generated tokens that have left the window, layer l of m keeps the share
    `gen_compress_ratio * r(l)`, `r(l) = d + (1 - d) * (cos(pi * l / m) + 1) / 2` with
    d = `gen_decay_ratio`, rounded down. What the prompt left is not touched. Goes with the scorer
    `recent_ensemble`.

    Attributes:
        gen_window: generated tokens that are recent, a multiple of `gen_interval`: the queries of
            the window are then exactly those that came after the group which leaves it.
        gen_interval: tokens of a group, the authors' exceed_length_to_compress.
        gen_compress_ratio: the share that the lowest layer keeps.
        gen_decay_ratio: towards which part of it the shares fall with depth.
    """

    kind: Literal["thin_generated"] = "thin_generated"
    gen_window: int = Field(default=64, ge=1)
    gen_interval: int = Field(default=16, ge=1)
    gen_compress_ratio: float = Field(default=0.9, ge=0, le=1)
    gen_decay_ratio: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _whole_groups(self) -> ThinGeneratedSchedule:
        if self.gen_window % self.gen_interval:
            raise ValueError(
                f"gen_window {self.gen_window} must be a multiple of gen_interval "
                f"{self.gen_interval}: generated tokens leave the window in groups of that many"
            )
        return self

    def check(self, policy: Policy) -> None:
        if not isinstance(policy.scorer, RecentEnsembleScorer):
            raise ValueError(
                f"policy {policy.name!r} has the schedule {self.kind!r}, which goes on as the "
                "scorer recent_ensemble began with the prompt, but its scorer is "
                f"{policy.scorer.kind!r}: choose the schedule interval"
            )

    @property
    def every(self) -> int:
        return self.gen_interval

    def kept(self, left: int, num_layers: int) -> IntArray:
        """Return what stays of `left` generated tokens that left the window: `[num_layers]`."""
        share = self.gen_decay_ratio
        falls = [(math.cos(math.pi * layer / num_layers) + 1) / 2 for layer in range(num_layers)]
        rates = [self.gen_compress_ratio * (share + (1 - share) * fall) for fall in falls]
        return np.array([int(left * rate) for rate in rates], np.int32)

    def kept_of_group(self, group: int, num_layers: int) -> IntArray:
        """Return what stays of a group; 1 is the first to leave the window: `[num_layers]`."""
        return _kept_of_group(self, group, num_layers)

    def keep(self, prompt: EvictionPoint, computed: int, usual: EvictionPoint) -> IntArray:
        """Return what is held of the prompt, kept of the groups, and the window."""
        recent = self.recent(prompt, computed)
        left = computed - prompt.computed - recent
        return prompt.held + self.kept(left, prompt.num_layers) + recent

    def front(self, prompt: EvictionPoint, computed: int) -> IntArray:
        return prompt.held

    def recent(self, prompt: EvictionPoint, computed: int) -> int:
        return min(self.gen_window, computed - prompt.computed)


@lru_cache(maxsize=4096)  # every layer asks for its number of the same groups
def _kept_of_group(schedule: ThinGeneratedSchedule, group: int, num_layers: int) -> IntArray:
    left = group * schedule.gen_interval
    before = left - schedule.gen_interval
    return schedule.kept(left, num_layers) - schedule.kept(before, num_layers)
