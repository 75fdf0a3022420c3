# SPDX-License-Identifier: Apache-2.0
"""How many blocks a plan's request holds at most, and how long its steps are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan.deferred import DeferredPlan, Plan
from vllm_pyramid.plan.eviction_point import IntArray, read_only
from vllm_pyramid.plan.retention import RetentionPlan


def peak_blocks(
    plan: Plan,
    tokens: int,
    block_sizes: npt.NDArray[Any],
    late: int = 0,
    stages: Sequence[int] = (),
    *,
    evicted: bool = False,
) -> IntArray:
    """Return each layer's blocks at the moment when all layers together hold most, `[num_layers]`.

    Their sum is the request's peak, or an upper bound of it if the request evicts after the
    prompt's end. A deferred plan counts as its estimate.

    Args:
        tokens: tokens computed at the last moment considered, at least those of the prompt.
        block_sizes: `[num_layers]`, see `EvictionPoint.blocks_in`.
        late: tokens that may be computed before blocks are back from an eviction.
        stages: layers of each pipeline stage, where stages have pools of their own: the moment is
            then chosen for each stage by itself.
        evicted: consider only moments behind the first eviction; zeros if there is none.
    """
    plan = plan.estimate()
    assert tokens >= plan.prompt_len
    ends = np.array([point.computed for point in plan.points], np.int32)
    skips = np.stack([np.zeros_like(plan.end.skip), *(point.skip for point in plan.inner)])
    ends = np.minimum(ends + late, tokens)
    moments = -(-ends[:, None] // block_sizes) - skips // block_sizes
    if evicted:
        moments[0] = 0
    if tokens > plan.prompt_len and not plan.every:
        end = -(-tokens // block_sizes) - plan.end.skip // block_sizes
        moments = np.concatenate([moments, end[None]])
    elif tokens > plan.prompt_len:
        later = _blocks_between_evictions(plan, tokens, block_sizes, late, stages)
        moments = np.concatenate([moments, later[None]])
    ends_of_stages = np.cumsum(stages or (plan.num_layers,))[:-1]
    peaks = [
        of_stage[int(of_stage.sum(axis=1).argmax())]
        for of_stage in np.split(moments, ends_of_stages, axis=1)
    ]
    return read_only(np.concatenate(peaks))


def _blocks_between_evictions(
    plan: RetentionPlan,
    tokens: int,
    block_sizes: npt.NDArray[Any],
    late: int,
    stages: Sequence[int],
) -> npt.NDArray[Any]:
    """Return an upper bound of each layer's blocks between two evictions during generation.

    The total that all layers keep grows with each eviction until it is the budget, though a single
    layer's part may fall. Of each layer's blocks the last may be filled in part, and the first may
    have tokens beyond what is kept.
    """
    end, last = plan.end_number, plan.evictions_by(tokens)
    keeps = np.stack([plan.after(number).keep for number in (end, last)])
    if len(stages) > 1 and np.ptp(keeps, axis=1).any():  # a stage's share may fall again
        numbers = range(end, last + 1)
        keeps = np.stack([plan.after(number).keep for number in numbers])
    of_stages = stages or (plan.num_layers,)
    totals = np.add.reduceat(keeps, np.cumsum((0, *of_stages[:-1])), axis=1).max(axis=0)
    means = np.repeat(-(-totals // np.array(of_stages)), of_stages)
    bound = -(-(means + plan.every + late) // block_sizes) + 2
    return np.minimum(bound, -(-tokens // block_sizes))


def overwritten_blocks(plan: Plan, stages: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return how many whole blocks the first eviction writes to at most, `[stages]`.

    `stages` has the layers of each pipeline stage; a deferred plan has one.
    """
    if plan.is_deferred:
        assert len(stages) == 1, "lengths are decided from the scores of all layers"
        # Each layer's share is rounded up, and may be one block more where blocks are filled.
        kept = -(-plan.budget_tokens * plan.num_layers // plan.block_size)
        whole = plan.num_layers * (plan.prompt_len // plan.block_size)
        return np.array([min(kept + 2 * plan.num_layers, whole)], np.int64)
    starts = np.cumsum([0, *stages[:-1]])
    blocks: npt.NDArray[np.int64] = np.add.reduceat(
        plan.points[0].blocks_behind.astype(np.int64), starts
    )
    return blocks


def least_given_back(plan: DeferredPlan, block_sizes: npt.NDArray[Any]) -> int:
    """Return how many blocks the eviction gives back at least in all layers, at any lengths."""
    # Of what each layer skips, less than a block may have to stay.
    skipped = plan.num_layers * (plan.prompt_len - plan.budget_tokens)
    largest = int(block_sizes.max())
    return max(-(-(skipped - plan.num_layers * (largest - 1)) // largest), 0)


def tokens_per_step(plan: RetentionPlan, longest: int) -> tuple[int, int]:
    """Return bounds of the prompt tokens that a step computes; steps end at evictions.

    `longest` is the most tokens of a chunk. Returns the smallest mean over the steps that follow
    the prompt's beginning or one of its evictions, and the most tokens that one step computes.
    """
    stretches = np.diff([point.computed for point in plan.points], prepend=0)[::-1]
    steps = -(-stretches // longest)
    means = stretches.cumsum() // np.maximum(steps.cumsum(), 1)
    return max(int(means.min()), 1), min(int(stretches.max()), longest)
