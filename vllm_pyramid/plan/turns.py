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

from vllm_pyramid.plan.eviction_point import EvictionPoint, IntArray, read_only
from vllm_pyramid.plan.retention import RetentionPlan


def with_turns(
    plan: RetentionPlan, turns: Sequence[EvictionPoint], min_distance: int
) -> RetentionPlan:
    """Return the plan of a prompt with evictions where earlier turns ended.

    An eviction is left out if no layer has anything to give back, or if it is closer than
    `min_distance` tokens to the one before: the queries that score would not all be there. Slots
    that were given back cannot be taken back: a layer that should keep more than it holds keeps
    what it holds.

    Args:
        plan: the plan of the whole prompt.
        turns: the eviction at the end of each earlier turn's prompt, in order; all made by one
            policy and budget.
        min_distance: tokens.
    """
    skip = np.zeros_like(plan.end.skip)
    inner: list[EvictionPoint] = []
    for turn in turns:
        end = inner[-1].computed if inner else 0
        if inner and turn.computed - end < min_distance:
            continue
        wanted = np.maximum(turn.skip, skip)
        if (wanted > skip).any():
            inner.append(_skipping(turn, wanted))
            skip = wanted
    if not inner:
        return plan
    if plan.prompt_len - inner[-1].computed >= min_distance:
        skip = np.maximum(plan.end.skip, skip)
    return replace(plan, points=(*inner, _skipping(plan.end, skip)))


def _skipping(point: EvictionPoint, skip: IntArray) -> EvictionPoint:
    """Return the point with these skips; the point itself if they are its own."""
    if (point.skip == skip).all():
        return point
    held = point.computed - skip
    keep = np.where(skip < point.skip, held, np.minimum(point.keep, held))
    return replace(point, skip=read_only(skip), keep=read_only(keep))
