# SPDX-License-Identifier: Apache-2.0
"""The plan of a conversation: evictions where earlier turns' prompts ended, and at the end.

    tokens      0 ..... n_1 ......... n_2 ................ n
    turn        first   answer, second  answer, third
    eviction            1             2                  3

What a layer holds behind a turn's end follows from the tokens and from the ends up to there, never
from a later one: so what one request has left, the next one of the conversation can go on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_pyramid.plan.retention import IntArray, RetentionPlan


def with_turns(plan: RetentionPlan, turns: Sequence[RetentionPlan], least: int) -> RetentionPlan:
    """The plan of a prompt with evictions where the turns before ended.

    No eviction takes place where no layer has anything to give, nor closer than `least` tokens
    behind the one before: the queries that score would not all be there. What was given back
    cannot be taken back: a layer that was to keep more than it holds keeps what it holds.

    Args:
        plan: of the whole prompt. turns: of the prompts of the turns before it, in order; all made
            by one policy and budget, and evicting once. least: tokens.

    Returns:
        The evictions that take place are its `inner`, and the prompt's end, at which it may have
        nothing to give.
    """
    skip = np.zeros_like(plan.skip)
    inner: list[RetentionPlan] = []
    for turn in turns:
        end = inner[-1].prompt_len if inner else 0
        if inner and turn.prompt_len - end < least:
            continue
        wanted = np.maximum(turn.skip, skip)
        if (wanted > skip).any():
            inner.append(_skipping(turn, wanted))
            skip = wanted
    if not inner:
        return plan
    if plan.prompt_len - inner[-1].prompt_len >= least:
        skip = np.maximum(plan.skip, skip)
    return replace(_skipping(plan, skip), inner=tuple(inner))


def _skipping(plan: RetentionPlan, skip: IntArray) -> RetentionPlan:
    """The plan with these skips; unchanged where they are its own."""
    if (plan.skip == skip).all():
        return plan
    held = plan.prompt_len - skip
    keep = np.where(skip < plan.skip, held, np.minimum(plan.keep, held)).astype(np.int32)
    skip = skip.copy()
    for values in (skip, keep):
        values.flags.writeable = False
    return replace(plan, skip=skip, keep=keep)
