# SPDX-License-Identifier: Apache-2.0
"""What a policy keeps of a prompt of a given length, and what follows from it: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from vllm_pyramid.plan import (
    Budget,
    EvictionPoint,
    IntArray,
    LevelPlan,
    Plan,
    RetentionPlan,
    affordable,
    peak_blocks,
    with_turns,
)
from vllm_pyramid.plan.cache import cached_by_bytes
from vllm_pyramid.plan.eviction_point import read_only
from vllm_pyramid.policy.allocator import CurveAllocator, point_of_tokens
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.kept_spans import Spans, end_plan, end_points, stays_in_place
from vllm_pyramid.policy.limits import CACHE_BYTES, FREE_EVICTIONS, TOKENS_PER_EVICTION

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy


@cached_by_bytes(CACHE_BYTES)
def plan_prompt(
    policy: Policy,
    prompt_len: int,
    num_layers: int,
    block_size: int,
    budget: Budget,
    turns: tuple[int, ...],
    spans: Spans,
) -> Plan:
    """Return the plan of a prompt; see `Policy.plan`. Cached: equal arguments, same object."""
    assert prompt_len >= 0 and num_layers >= 1 and block_size >= 1
    policy.check_layers(num_layers)
    of_heads = policy.heads.plan(policy, prompt_len, num_layers, block_size, budget)
    if of_heads is not None:
        assert not turns and not spans, "refused by the part's `unsupported`"
        return of_heads
    if policy.schedule.keeps_prompts:
        return _answer_plan(policy, prompt_len, num_layers, block_size, budget)
    *may_evict, may_end = affordable((*turns, prompt_len), FREE_EVICTIONS, TOKENS_PER_EVICTION)
    evicting = list(compress(turns, may_evict))
    in_place = stays_in_place(policy, min((*evicting, prompt_len)), block_size, spans)
    plan = end_plan(policy, prompt_len, num_layers, block_size, budget, spans, in_place)
    if policy.schedule.waits_for_orders:
        return _level_plan(policy, plan, num_layers, block_size, budget, spans)
    if not turns:
        return policy.chunk.plan(policy, plan, spans)
    assert isinstance(plan, RetentionPlan) and turns[-1] < prompt_len
    points = end_points(policy, evicting, num_layers, block_size, budget, spans, in_place)
    return with_turns(plan, points, policy.min_turn, ends_with_eviction=may_end)


def _answer_plan(
    policy: Policy, prompt_len: int, num_layers: int, block_size: int, budget: Budget
) -> RetentionPlan:
    """Return the plan of a request whose prompt stays whole: the budget is its answer's."""
    whole = np.full(num_layers, prompt_len)
    end = EvictionPoint.of(prompt_len, block_size, prompt_len, whole, True, front=prompt_len)
    end = replace(end, in_place=prompt_len // block_size * block_size)
    later = partial(_answer_point, policy, end, budget.floor(policy.min_budget))
    return RetentionPlan((end,)).repeated(policy.schedule.every, later)


def _answer_point(policy: Policy, end: EvictionPoint, target: int, computed: int) -> EvictionPoint:
    """Return what is kept after `computed` tokens: the prompt, and a mean of `target` behind it."""
    assert isinstance(policy.allocator, CurveAllocator)
    tokens, layers = computed - end.computed, end.num_layers
    mean = min(target, tokens)
    point = point_of_tokens(policy, policy.allocator, tokens, layers, end.block_size, mean)
    beside = point.beside(end.computed, end.in_place)
    return replace(beside, front=read_only(np.full(layers, end.computed)))


def _level_plan(
    policy: Policy, floor: Plan, num_layers: int, block_size: int, budget: Budget, spans: Spans
) -> Plan:
    """Return the plan of a prompt that orders evict step by step, down to `floor`.

    Levels are shares of what no span has. To later points, the tokens computed by then are a
    prompt.
    """
    assert isinstance(floor, RetentionPlan), "refused by `Heads.works_with_orders` and its like"
    counted = max(int(policy.schedule.counts_budgets * floor.end.budget_tokens), 1)
    plans = (
        end_plan(policy, floor.prompt_len, num_layers, block_size, share, spans)
        for share in (
            Budget(tokens=max(floor.prompt_len, 1)),
            *policy.schedule.budgets_above,
            Budget(tokens=counted),
        )
    )
    whole, *levels = [plan.estimate().end for plan in plans]

    def longer(tokens: int) -> RetentionPlan:
        plan = plan_prompt(policy, tokens, num_layers, block_size, budget, (), spans)
        assert isinstance(plan, RetentionPlan)
        return plan

    return LevelPlan.of(whole, [*levels, floor.end], policy.schedule.levels_every, longer)


def levels_per_token(policy: Policy, longest: int, num_layers: int, block_size: int) -> int:
    """Return for how many tokens' levels workers have memory, for each token of the pool.

    The levels of a request are stored for as many tokens in each layer as one of its layers has at
    most. That is its prompt until it is ordered to evict, and then more than the mean.
    """
    plan = policy.plan(longest, num_layers, block_size)
    if not isinstance(plan, LevelPlan) or plan.headroom is None:
        return 1
    held = plan.headroom.held
    return -(-num_layers * int(held.max()) // int(held.sum()))


def reusable_tokens(policy: Policy, plan: Plan) -> int | None:
    """Return how many first tokens of a request have the KV of the full cache; None: all of them.

    Blocks beyond `shareable_tokens` are copied into the request's own blocks, and out of them
    before it evicts; not where some KV heads never evict, whose blocks are bundles of their own.
    """
    if policy.why_not(Feature.PREFIX_CACHING) is not None or plan.pieces:
        return 0
    if plan.untouched is None:
        return plan.prompt_len if policy.approximates_answers else None
    lasts = isinstance(plan, RetentionPlan) and plan.whole is not None and bool(plan.whole.any())
    copies = policy.copies_blocks and not lasts
    return plan.exact_tokens if copies else plan.untouched


def shareable_tokens(policy: Policy, plan: Plan) -> int | None:
    """Return how many first tokens of a request have blocks that it may share; None: all of them.

    Their KV is that of the full cache, and no eviction of this request writes into their blocks.
    """
    reusable = reusable_tokens(policy, plan)
    return reusable if plan.untouched is None or reusable == 0 else plan.untouched


def peak_blocks_up_to(
    policy: Policy, longest: int, num_layers: int, block_size: int, stages: Sequence[int] = ()
) -> IntArray:
    """Return each layer's blocks at the worst moment of any prompt up to `longest` tokens.

    Their sum (each of `stages`' sums) is what a pool must have. Policies that evict inside prompts
    are considered until their first eviction after the prompt.
    """
    sizes = policy.block_sizes(num_layers, block_size)
    generated = policy.schedule.every if policy.inner_policy is not None else 0
    ends = np.cumsum(stages or (num_layers,))[:-1]
    peaks = []
    for length in {longest, policy.chunk.worst_length(policy, longest)}:
        plan = policy.plan(length, num_layers, int(sizes.max()))
        peaks.append(np.split(peak_blocks(plan, length + generated, sizes, stages=stages), ends))
    worst = [max(of_stage, key=np.sum) for of_stage in zip(*peaks, strict=True)]
    # Where blocks begin in another prompt, a layer may touch one more.
    blocks = np.concatenate(worst) + (policy.inner_policy is not None)
    return np.minimum(blocks, -(-longest // sizes)).astype(np.int32)


def can_evict_after(policy: Policy, tokens: int, num_layers: int, block_size: int) -> bool:
    """Return whether a chunk of up to `tokens` tokens can end at an eviction."""
    if 0 < policy.chunk.tokens <= tokens:
        return True
    budget = Budget(tokens=policy.min_budget)
    without_floor = policy.model_copy(update={"min_tokens": None})
    try:
        policy.check_budget(budget)
    except ValueError:
        return True
    lengths = range(1, tokens + 1)
    plans = (without_floor.plan(length, num_layers, block_size, budget) for length in lengths)
    return any(plan.evicts for plan in plans)
