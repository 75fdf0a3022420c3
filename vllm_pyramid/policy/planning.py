# SPDX-License-Identifier: Apache-2.0
"""From a policy and the length of a prompt to a plan: at the prompt's end and at later evictions.

Pure functions, cached: scheduler and workers ask for the same plans on their own.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.policy.allocators import Allocator
from vllm_pyramid.policy.budget import Budget
from vllm_pyramid.policy.plans import OpenPlan, Plan, RetentionPlan
from vllm_pyramid.policy.thinning import thinning_plan

if TYPE_CHECKING:
    from vllm_pyramid.policy.base import Policy


@lru_cache(maxsize=8192)
def plan_for(
    policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
) -> Plan:
    """`Policy.plan`, cached."""
    assert prompt_len >= 0 and num_layers >= 1 and block_size >= 1
    policy.check_layers(num_layers)
    if policy.thinner is not None:
        plan = thinning_plan(
            policy.thinner,
            prompt_len,
            num_layers,
            block_size,
            budget=budget,
            sinks=policy.sinks,
            fill_blocks=policy.fill_blocks,
        )
        if not policy.schedule.every:
            return plan
        return plan.repeated(policy.schedule.every, partial(_later_thinned, policy, plan))
    mean = prompt_len
    if policy.evicts:
        mean = budget.tokens_for(prompt_len, policy.min_budget)
    fixed = policy.window + policy.sinks
    solver = policy.solver
    if solver is not None and (fixed < prompt_len if solver.sets_total else mean < prompt_len):
        assert fixed < mean, (fixed, mean, "the budget was not checked")
        return OpenPlan(
            prompt_len,
            block_size,
            num_layers,
            mean,
            floor=fixed,
            exact=not solver.sets_total,
            fill_blocks=policy.fill_blocks,
        )
    plan = _settled(policy, prompt_len, num_layers, block_size, mean)
    if not policy.schedule.every:
        return plan
    # A share is one of the prompt, also when more has been generated.
    target = budget.tokens or max(mean, policy.min_budget)
    return plan.repeated(policy.schedule.every, partial(_later_plan, policy, plan, target))


@lru_cache(maxsize=8192)
def _settled(
    policy: Policy, tokens: int, num_layers: int, block_size: int, mean: int
) -> RetentionPlan:
    """What the allocator keeps of `tokens` tokens, on average `mean` a layer."""
    fixed = policy.window + policy.sinks
    if mean == tokens:
        keep = np.full(num_layers, tokens)
    else:
        assert fixed < mean, (fixed, mean, "the budget was not checked")
        assert isinstance(policy.allocator, Allocator)
        keep = fixed + policy.allocator.allocate(mean - fixed, num_layers, tokens - fixed)
    return _plan_of(policy, tokens, block_size, mean, keep, np.zeros_like(keep))


def _plan_of(
    policy: Policy,
    tokens: int,
    block_size: int,
    mean: int,
    keep: npt.NDArray[Any],
    front: npt.NDArray[Any],
) -> RetentionPlan:
    recent = np.floor(keep * policy.selector.recent_share)
    return RetentionPlan.of(
        tokens,
        block_size,
        mean,
        keep,
        policy.fill_blocks,
        front=np.maximum(policy.sinks, front),
        recent=np.maximum(policy.window, recent),
    )


def _later_plan(policy: Policy, prompt: RetentionPlan, target: int, computed: int) -> RetentionPlan:
    """What is kept at the eviction after `computed` tokens; `target` is the prompt's budget."""
    layers, block_size, mean = len(prompt.keep), prompt.block_size, min(target, computed)
    thinned = _settled(policy, computed, layers, block_size, mean)
    keep = policy.schedule.keep(prompt, computed, thinned)
    front = policy.schedule.front(prompt, computed)
    if keep is thinned.keep and not front.any():
        return thinned
    return _plan_of(policy, computed, block_size, -(-int(keep.sum()) // layers), keep, front)


@lru_cache(maxsize=8192)
def _later_thinned(policy: Policy, prompt: RetentionPlan, computed: int) -> RetentionPlan:
    """What is kept at the eviction after `computed` tokens of a prompt that was thinned.

    The room that was filled at the prompt's end stays filled: the prompt's tokens are not touched.
    """
    keep = policy.schedule.keep(prompt, computed, prompt)
    return RetentionPlan.of(
        computed,
        prompt.block_size,
        -(-int(keep.sum()) // len(keep)),
        keep,
        policy.fill_blocks,
        front=policy.schedule.front(prompt, computed),
        recent=policy.schedule.recent(prompt, computed),
    )
