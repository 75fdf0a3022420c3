# SPDX-License-Identifier: Apache-2.0
"""Which parts of a policy go together; what would have no effect or cannot work is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pyramid.policy.schedules import ThinGeneratedSchedule
from vllm_pyramid.policy.scorers import AccumulatingScorer
from vllm_pyramid.policy.selectors import TopKSharedSelector
from vllm_pyramid.policy.thinning import DecayAllocator

if TYPE_CHECKING:
    from vllm_pyramid.policy.base import Policy


def check_combination(policy: Policy) -> None:
    """Raise ValueError unless name, scorer, allocator, selector and schedule fit one another."""
    if policy.name == "none" or (policy.name == "full" and (policy.evicts or policy.swap_v)):
        raise ValueError(
            f"the name {policy.name!r} is reserved (none: plugin off, full: everything kept on "
            "the device): give this policy another one"
            + (", or choose kcache" if policy.swap_v else "")
        )
    for name in ("top_n", "device_layers", "renormalize"):
        if not policy.swap_v and getattr(policy, name) != type(policy).model_fields[name].default:
            raise ValueError(
                f"`{name}` of policy {policy.name!r} would have no effect: it is for policies "
                "that keep V in host memory (`swap_v: true`)"
            )
    if policy.needs_scores and policy.window < 1:
        raise ValueError(
            f"policy {policy.name!r} scores with the queries of the observation window, so "
            f"`window` must be at least 1, not {policy.window}"
        )
    if policy.solver is not None and not policy.needs_scores:
        raise ValueError(
            f"policy {policy.name!r} has the allocator {policy.allocator.kind!r}, which takes the "
            f"lengths from attention scores, but its scorer {policy.scorer.kind!r} has none: "
            "choose the scorer observation_window"
        )
    _check_schedule(policy)
    _check_thinning(policy)


def _check_schedule(policy: Policy) -> None:
    scorer, every = policy.scorer, policy.schedule.every
    if policy.selector.recent_share and not scorer.accumulates:
        raise ValueError(
            f"policy {policy.name!r} sets selector.recent, which its scorer {scorer.kind!r} does "
            "not use: set `window` instead"
        )
    if policy.swap_v and (every or scorer.accumulates or scorer.thins):
        raise ValueError(
            f"policy {policy.name!r} keeps V in host memory (swap_v), which goes with evictions "
            f"at the prompt's end alone so far, by scores made there: its schedule is "
            f"{policy.schedule.kind!r} and its scorer {scorer.kind!r}"
        )
    thins_generated = isinstance(policy.schedule, ThinGeneratedSchedule)
    if thins_generated and not scorer.thins:
        raise ValueError(
            f"policy {policy.name!r} has the schedule {policy.schedule.kind!r}, which goes on as "
            "the scorer recent_ensemble began with the prompt, but its scorer is "
            f"{scorer.kind!r}: choose the schedule interval"
        )
    if not every or thins_generated:
        return
    if scorer.thins:
        raise ValueError(
            f"policy {policy.name!r} thins prompts between layers; what is generated is thinned "
            f"by the schedule thin_generated, not by {policy.schedule.kind!r}"
        )
    if policy.needs_scores or not policy.evicts:
        raise ValueError(
            f"policy {policy.name!r} has the schedule {policy.schedule.kind!r}, but its scorer "
            f"{scorer.kind!r} has no scores during generation: choose one that accumulates "
            "(accumulated_attention, persistence) or recency"
        )
    history = scorer.history if isinstance(scorer, AccumulatingScorer) else None
    if history is not None and history > every:
        raise ValueError(
            f"policy {policy.name!r} looks back over {history} queries but evicts every {every} "
            "tokens: a history window must not reach beyond the eviction before"
        )


def _check_thinning(policy: Policy) -> None:
    parts = (
        policy.scorer.thins,
        isinstance(policy.allocator, DecayAllocator),
        isinstance(policy.selector, TopKSharedSelector),
    )
    if len(set(parts)) > 1:
        raise ValueError(
            f"policy {policy.name!r}: the scorer recent_ensemble, the allocator decay and the "
            "selector top_k_shared thin prompts between layers and only go together, not with "
            f"{policy.scorer.kind!r}, {policy.allocator.kind!r} and {policy.selector.kind!r}"
        )
    if (thinner := policy.thinner) is not None and (
        policy.window or policy.sinks > thinner.min_context
    ):
        raise ValueError(
            f"policy {policy.name!r} thins prompts between layers: `window` must be 0 (recent "
            f"tokens are the recent_ratio), not {policy.window}, and `sinks` at most the "
            f"min_context of {thinner.min_context}, not {policy.sinks}"
        )
