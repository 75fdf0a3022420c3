# SPDX-License-Identifier: Apache-2.0
"""The contract of an allocator: a pure function that says how many tokens each layer keeps.

Notation: m layers, l = 0 .. m-1 from the input side, B the mean number of tokens that a layer keeps
in addition to window and sinks, C how many such tokens the prompt has, B <= C.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import Budget, DeferredPlan, EvictionPoint, Plan, RetentionPlan
from vllm_pyramid.plan.cache import cached_by_bytes
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component
from vllm_pyramid.policy.limits import CACHE_BYTES

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Allocator(Component):
    """Base class of allocators. Most derive from `CurveAllocator` and override `curve`.

    Class attributes:
        defers: lengths are decided from the prompt's scores at its end (`DeferredPlan`).
        thins_prompts: tokens leave the forward pass between layers, so a prompt's full attention is
            never computed; the lengths follow from the allocator's settings, which a budget lowers.
    """

    section: ClassVar[str] = "allocator"
    defers: ClassVar[bool] = False
    thins_prompts: ClassVar[bool] = False

    @abstractmethod
    def plan(
        self, policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
    ) -> Plan:
        """Return what each layer keeps of a prompt; `Policy.plan` caches it."""

    def ends(
        self,
        policy: Policy,
        prompt_lens: Sequence[int],
        num_layers: int,
        block_size: int,
        budget: Budget,
    ) -> list[EvictionPoint]:
        """Return what each layer keeps at the ends of several prompts: the turns of one request."""
        plans = (
            self.plan(policy, prompt_len, num_layers, block_size, budget)
            for prompt_len in prompt_lens
        )
        return [plan.estimate().end for plan in plans]

    def check_calibration(self, policy: Policy) -> None:
        """Raise ValueError unless shares of layers can be measured from the lengths it decides."""

    @property
    def unsupported(self) -> Unsupported:
        if not self.thins_prompts:
            return {}
        drops = "it drops tokens between layers"
        return {
            Feature.PIPELINE: f"{drops}, and the next stage expects them",
            Feature.HIDDEN_STATES: f"{drops}, and drafts need the hidden states of all tokens",
            Feature.KV_KEEP: drops,
            Feature.SHADOW: f"{drops}, so prompts that are held whole may not fit",
        }

    @property
    def samples(self) -> bool:
        """Return whether some requests take the average of others (`kv_application`)."""
        return False

    def default_budget(self) -> Budget | None:
        """Return the budget if the user chose this allocator but no budget; None: the preset's."""
        return None


class CurveAllocator(Allocator):
    """Base class of allocators whose lengths follow from B, m and C: `curve`, rounded."""

    @abstractmethod
    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        """Return the tokens per layer: `[m]` float64 within [0, C] that sums to B * m up to
        rounding.

        `mean` is B, 0 <= B <= C; `num_layers` m >= 1; `capacity` C.
        """

    def curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        """Return the curves of several prompts, `[T, m]`; `means` and `capacities` are `[T]`.

        Override it together with `curve` where all can be computed at once, with equal results.
        """
        both = zip(means.tolist(), capacities.tolist(), strict=True)
        return np.stack([self.curve(mean, num_layers, capacity) for mean, capacity in both])

    @classmethod
    def check_class(cls) -> None:
        if cls.curve is CurveAllocator.curve:
            raise ValueError(
                f"the allocator {cls.__module__}:{cls.__qualname__} has no method "
                "`curve(self, mean, num_layers, capacity)`"
            )

    def allocate(self, mean: int, num_layers: int, capacity: int) -> Integers:
        """Return `curve` in whole tokens, `[m]` int64 in [0, C] that sum to B * m."""
        return self.allocate_all(np.array([mean]), num_layers, np.array([capacity]))[0]

    def allocate_all(self, means: Integers, num_layers: int, capacities: Integers) -> Integers:
        """Return `allocate` of several prompts, `[T, m]`; `means` and `capacities` are `[T]`."""
        assert num_layers >= 1 and (means >= 0).all() and (means <= capacities).all()
        tokens = np.repeat(means[:, None], num_layers, axis=1).astype(np.int64)
        divided = np.flatnonzero((means > 0) & (means < capacities) & (num_layers > 1))
        if divided.size:
            means, capacities = means[divided], capacities[divided]
            curves = self._curves(means, num_layers, capacities)
            tokens[divided] = found = round_all_to_sum(curves, means * num_layers)
            low, high = found.min(axis=1), found.max(axis=1)
            if (wrong := (low < 0) | (high > capacities)).any():
                row = int(wrong.argmax())
                raise RuntimeError(
                    f"the allocator {self.kind!r} gives layers {low[row]} to {high[row]} tokens, "
                    f"outside 0 to {capacities[row]}"
                )
        return tokens

    def _curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        last = next(cls for cls in type(self).__mro__ if {"curve", "curves"} & vars(cls).keys())
        if "curves" in vars(last):
            return self.curves(means, num_layers, capacities)
        return CurveAllocator.curves(self, means, num_layers, capacities)

    def plan(
        self, policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
    ) -> Plan:
        """Plan a mean of the budget; repeat it during generation if the schedule does."""
        mean = prompt_len
        if policy.evicts:
            mean = budget.tokens_for(prompt_len, policy.min_budget)
        end = point_of_tokens(policy, self, prompt_len, num_layers, block_size, mean)
        plan = RetentionPlan((end,))
        if not policy.schedule.every:
            return plan
        # A share refers to the prompt, also when more has been generated.
        target = max(mean, budget.floor(policy.min_budget))
        return plan.repeated(policy.schedule.every, partial(_later_point, policy, end, target))

    def ends(
        self,
        policy: Policy,
        prompt_lens: Sequence[int],
        num_layers: int,
        block_size: int,
        budget: Budget,
    ) -> list[EvictionPoint]:
        means = list(prompt_lens)
        if policy.evicts:
            means = [budget.tokens_for(tokens, policy.min_budget) for tokens in prompt_lens]
        return points_of_tokens(policy, self, prompt_lens, num_layers, block_size, means)


def round_all_to_sum(curves: Reals, totals: Integers) -> Integers:
    """Round by largest remainder: whole numbers next to `curves`, `[T, m]`, that sum to `totals`.

    Ties go to the lower layer, so a curve that does not rise gives integers that do not rise.
    """
    # Values such as 2.9999999996 are whole numbers that float arithmetic missed.
    millionths = np.rint(curves * 1e6).astype(np.int64)
    result = millionths // 1_000_000
    missing = totals - result.sum(axis=1)
    num_layers = curves.shape[1]
    if not (missing >= 0).all() or not (missing < max(num_layers, 1)).all():
        raise RuntimeError(f"curves that sum to {curves.sum(axis=1)} are to sum to {totals}")
    # A number for each remainder, and no number twice: the lower of two layers has the larger one.
    ranks = (millionths - result * 1_000_000) * num_layers + np.arange(num_layers - 1, -1, -1)
    least = np.take_along_axis(np.sort(ranks, axis=1), num_layers - 1 - missing[:, None], axis=1)
    return result + (ranks > least)


@cached_by_bytes(CACHE_BYTES)
def point_of_tokens(
    policy: Policy,
    allocator: CurveAllocator | None,
    tokens: int,
    num_layers: int,
    block_size: int,
    mean: int,
) -> EvictionPoint:
    """Return the point that keeps a mean of `mean` of `tokens` tokens; None if all are kept."""
    return points_of_tokens(policy, allocator, [tokens], num_layers, block_size, [mean])[0]


def points_of_tokens(
    policy: Policy,
    allocator: CurveAllocator | None,
    tokens: Sequence[int],
    num_layers: int,
    block_size: int,
    means: Sequence[int],
) -> list[EvictionPoint]:
    """Return `point_of_tokens` of several numbers of tokens, computed together."""
    fixed = policy.window + policy.sinks
    all_tokens, all_means = np.array(tokens, np.int64), np.array(means, np.int64)
    keep = np.repeat(all_tokens[:, None], num_layers, axis=1)
    fewer = np.flatnonzero(all_means != all_tokens)
    if fewer.size:
        chosen, rest = all_means[fewer] - fixed, all_tokens[fewer] - fixed
        assert (chosen > 0).all(), (fixed, means, "the budget was not checked")
        assert allocator is not None
        keep[fewer] = fixed + allocator.allocate_all(chosen, num_layers, rest)
    return EvictionPoint.of_all(
        tokens,
        block_size,
        means,
        keep,
        policy.fill_blocks,
        front=np.full_like(keep, policy.sinks),
        recent=_recent(policy, keep),
    )


def _recent(policy: Policy, keep: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return how many of the last tokens stay in any case of those that are kept."""
    return np.maximum(policy.window, np.floor(keep * policy.selector.recent_share))


def open_plan(
    policy: Policy,
    prompt_len: int,
    num_layers: int,
    block_size: int,
    budget: Budget,
    *,
    sets_total: bool,
    safe: Callable[[int], int] = lambda mean: 0,
) -> Plan:
    """Return a plan whose lengths a prompt's scores decide, where it may be shortened.

    `sets_total`: they decide the total, too, up to the budget. `safe`: what each layer keeps at
    least.
    """
    mean = budget.tokens_for(prompt_len, policy.min_budget)
    fixed = policy.window + policy.sinks
    least = mean
    if sets_total:  # the floor of shares is one of what is found, too
        least = max(fixed, min(mean, 0 if budget.tokens else budget.min_tokens or 0))
    if least >= prompt_len:
        end = point_of_tokens(policy, None, prompt_len, num_layers, block_size, prompt_len)
        return RetentionPlan((end,))
    assert fixed < mean, (fixed, mean, "the budget was not checked")
    return DeferredPlan(
        *(prompt_len, block_size, num_layers, mean),
        floor=fixed,
        exact=not sets_total,
        min_tokens=least,
        fill_blocks=policy.fill_blocks,
        safe=safe(mean - fixed),
    )


def _later_point(
    policy: Policy, prompt: EvictionPoint, target: int, computed: int
) -> EvictionPoint:
    """Return what is kept after `computed` tokens; `target` is the prompt's budget."""
    assert isinstance(policy.allocator, CurveAllocator)
    layers, block_size, mean = prompt.num_layers, prompt.block_size, min(target, computed)
    usual = point_of_tokens(policy, policy.allocator, computed, layers, block_size, mean)
    keep = policy.schedule.keep(prompt, computed, usual)
    front = policy.schedule.front(prompt, computed)
    if keep is usual.keep and not front.any():
        return usual
    return EvictionPoint.of(
        *(computed, block_size, -(-int(keep.sum()) // layers), keep, policy.fill_blocks),
        front=np.maximum(policy.sinks, front),
        recent=_recent(policy, keep),
    )
