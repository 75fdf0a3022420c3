# SPDX-License-Identifier: Apache-2.0
"""Score, select and compact one layer's cache, when requests come to an eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.hooks import WorkerHooks
from vllm_pyramid.step.step import StepEvictions
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.step.window_mass import window_mass


def evict_layer(
    policy: Policy,
    call: AttentionInputs,
    evictions: StepEvictions,
    hooks: Sequence[WorkerHooks] = (),
    trace: TraceWriter | None = None,
) -> None:
    """Move the survivors of every request that evicts in this step to the tail of its range.

    Runs after the layer's attention, so all that it had was attended to. Prompts whose lengths are
    solved still hold everything here; who solves them evicts from them, in all layers together.

    Args:
        hooks: of the methods at work: one of them may have gathered scores.
    """
    evictions.copy_blocks(call, evictions.known)
    shortened = evictions.chosen(call.layer)
    inside = evictions.from_end[shortened] < 0
    of_inside = policy.inner_policy or policy
    for chooses, chosen in ((policy, shortened[~inside]), (of_inside, shortened[inside])):
        if chosen.size:
            _shorten(chooses, call, evictions, chosen, hooks, trace)


def _shorten(
    policy: Policy,
    call: AttentionInputs,
    evictions: StepEvictions,
    chosen: npt.NDArray[np.int64],
    hooks: Sequence[WorkerHooks],
    trace: TraceWriter | None,
) -> None:
    """The requests `chosen`, `[S]` indices, go by one policy."""
    batch = evictions.batch(call, policy, chosen)
    mass = window_mass(batch) if trace is not None else None
    gathered = (method.scores(batch) for method in hooks)
    scores = next((found for found in gathered if found is not None), None)
    if scores is None:
        scores, _ = policy.scorer.scores(batch)
    kept = batch.shorten(scores, trace, mass)
    for method in hooks:
        method.moved(batch, kept)
