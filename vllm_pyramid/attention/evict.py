# SPDX-License-Identifier: Apache-2.0
"""Score, select and compact one layer's cache, when requests come to an eviction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.eviction_rows import copy_overwritten
from vllm_pyramid.step.hooks import EvictionHooks, MethodHooks
from vllm_pyramid.step.score_check import ranked
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.step.window_mass import WindowMass, window_mass

_NO_HOOKS = MethodHooks()


def evict_layer(
    policy: Policy,
    inputs: AttentionInputs,
    evictions: StepEvictions,
    hooks: MethodHooks = _NO_HOOKS,
    trace: TraceWriter | None = None,
    only: npt.NDArray[np.int64] | None = None,
) -> None:
    """Move the survivors of every request that evicts in this step to the tail of its range.

    Runs after the layer's attention. Requests whose plans are deferred still hold everything here
    (`DeferredEviction`). Requests are evicted in pieces, so that their scores fit into the memory
    that is reserved. Requests whose scores cannot be ranked, or for which a method raises, have
    failed. `only` has the indices of the requests to evict, or whose scores a method takes; None:
    all.
    """
    if (taking := taken_scores(hooks, evictions)) is not None:
        method, wanted = taking
        chosen = np.arange(len(wanted.request_ids)) if only is None else only
        for piece in wanted.pieces(inputs, chosen):
            score_batch(wanted.batch(inputs, policy, piece), method)
        return
    decided, shortened = evictions.decided, evictions.shortened(inputs.layer)
    if only is not None:
        decided = np.intersect1d(decided, only).tolist()
        shortened = np.intersect1d(shortened, only)
    copy_overwritten(evictions, [inputs], decided, hooks.copy_blocks)
    inside = evictions.inside_prompt[shortened]
    for chooses, scorer, chosen in (
        (policy, hooks.scorer, shortened[~inside]),
        (policy.inner_policy or policy, hooks.scorer_inside, shortened[inside]),
    ):
        for piece in evictions.pieces(inputs, chosen):
            evict_batch(evictions.batch(inputs, chooses, piece), scorer, hooks, trace)


def evict_batch(
    batch: EvictionBatch,
    scorer: EvictionHooks | None,
    hooks: MethodHooks,
    trace: TraceWriter | None,
) -> None:
    """Score, select and compact a batch; hooks `scorer` may have scores, else the policy's has."""
    policy = batch.policy
    asks = policy.scorer.asks_ranks or (scorer is not None and scorer.asks_ranks)
    try:
        scores = scorer.score(batch) if scorer is not None else None
        if scores is None:
            scores = policy.scorer.scores(batch)
        if (found := ranked(batch, scores)) is not None:
            mass = window_mass(found[0]) if trace is not None else None
            shorten(*found, hooks, trace, mass)
    except Exception as error:
        what = f"an eviction of the policy {policy.name!r}"
        batch.evictions.failures.add_error(batch.request_ids, what, error, peers_wait=asks)


def taken_scores(
    hooks: MethodHooks, evictions: StepEvictions
) -> tuple[EvictionHooks, StepEvictions] | None:
    """Return the method that takes scores in a step, and of which requests; None: none does."""
    if (method := hooks.takes_scores) is None:
        return None
    try:
        wanted = method.wants_scores(evictions)
    except Exception as error:
        what = f"`wants_scores` of {method.label}"
        evictions.failures.add_error(
            evictions.request_ids, what, error, peers_wait=method.asks_ranks
        )
        return None
    if wanted is None:
        return None
    if wanted is not evictions and evictions.shortened_anywhere().size:
        raise RuntimeError("a step evicts requests, and others are scored; report this")
    return method, wanted


def score_batch(batch: EvictionBatch, method: EvictionHooks) -> None:
    """Score the requests of a batch, and give a method the scores of those that can be ranked."""
    asks = batch.policy.scorer.asks_ranks or method.asks_ranks
    try:
        if (found := ranked(batch, batch.policy.scorer.scores(batch))) is not None:
            method.take_scores(*found)
    except Exception as error:
        what = f"`take_scores` of {method.label}"
        batch.evictions.failures.add_error(batch.request_ids, what, error, peers_wait=asks)


def shorten(
    batch: EvictionBatch,
    scores: torch.Tensor,
    hooks: MethodHooks,
    trace: TraceWriter | None,
    mass: WindowMass | None,
) -> None:
    """Select the tokens that stay, and compact; methods are asked before and told after."""
    kept = batch.select(scores, trace, mass)
    for method in hooks.before_compact:
        method.before_compact(batch, kept)
    batch.compact(kept)
    for method in hooks.after_compact:
        method.after_compact(batch, kept)
