# SPDX-License-Identifier: Apache-2.0
"""The plan of a conversation: evictions where earlier turns' prompts ended, and at the end.

    tokens      0 ..... n_1 ......... n_2 ................ n
    turn        first   answer, second  answer, third
    eviction            1             2                  3

What a layer holds behind a turn's end depends on the tokens and on the turns up to there, never on
later turns: so the conversation's next request can resume with what this request held there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_pyramid.plan.eviction_point import EvictionPoint
from vllm_pyramid.plan.retention import RetentionPlan


def affordable(ends: Sequence[int], free: int, tokens: int) -> list[bool]:
    """Return which turns may evict where they end: a request pays for evictions with its tokens.

    The answer for one turn does not depend on later ones.

    Args:
        ends: tokens at which the turns end, in order.
        free: turns that may evict in a prompt of any length. tokens: what each further one costs.
    """
    count, answers = 0, []
    for end in ends:
        answers.append(count < free + end // tokens)
        count += answers[-1]
    return answers


def with_turns(
    plan: RetentionPlan,
    turns: Sequence[EvictionPoint],
    min_distance: int,
    *,
    ends_with_eviction: bool = True,
) -> RetentionPlan:
    """Return the plan of a prompt with evictions where earlier turns ended.

    An eviction is left out if no layer has anything to give back, or if it is closer than
    `min_distance` tokens to the one before: the queries that score would not all be there. Slots
    that were given back cannot be taken back: a layer that should keep more than it holds keeps
    what it holds.

    Args:
        plan: the plan of the whole prompt.
        turns: the eviction at the end of each earlier turn's prompt, in order, by one policy and
            budget.
        ends_with_eviction: whether the prompt's own end may evict.
    """
    skip = np.zeros_like(plan.end.skip)
    inner: list[EvictionPoint] = []
    end = 0
    for turn in turns:
        if inner and turn.computed - end < min_distance:
            continue
        wanted = np.maximum(turn.skip, skip)
        if wanted.tobytes() != skip.tobytes():  # in less time than an array operation takes
            inner.append(turn.skipping(wanted))
            skip, end = wanted, turn.computed
    if not inner and ends_with_eviction:
        return plan
    if ends_with_eviction and plan.prompt_len - end >= min_distance:
        skip = np.maximum(plan.end.skip, skip)
    return replace(plan, points=(*inner, plan.end.skipping(skip)))
