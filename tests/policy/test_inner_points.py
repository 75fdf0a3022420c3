# SPDX-License-Identifier: Apache-2.0
"""Plans with evictions inside the prompt, and what is refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.plan import RetentionPlan, peak_blocks
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.fit import Pool, check_fit
from vllm_pyramid.policy.planning import peak_blocks_up_to
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys

LAYERS = 5


def _plan(policy: Policy, prompt_len: int, block_size: int = 8) -> RetentionPlan:
    plan = policy.plan(prompt_len, LAYERS, block_size)
    assert isinstance(plan, RetentionPlan)
    return plan


POLICIES = st.builds(
    lambda name, budget, tokens, keep, args: load_policy(
        name, budget, {"window": 4, "chunk.tokens": tokens, "chunk.keep": keep, **args}
    ),
    st.sampled_from(["pyramidkv", "snapkv", "pyramidkv-wide", "keydiff"]),
    st.sampled_from([16, 40, 100, "12%", "60%", "100%"]),
    st.integers(16, 90),
    st.one_of(st.none(), st.integers(14, 120)),
    st.sampled_from([{}, {"fill_blocks": False}, {"chunk.scorer": None}, {"chunk.window": 9}]),
)


@pytest.mark.long
@settings(max_examples=600)
@given(policy=POLICIES, prompt_len=st.integers(1, 700), block_size=st.sampled_from([1, 4, 16]))
def test_points_and_lengths(policy: Policy, prompt_len: int, block_size: int) -> None:
    plan, n = _plan(policy, prompt_len, block_size), prompt_len
    without = policy.model_copy(update={"chunk": {"kind": "points"}})
    at_end = _plan(without, prompt_len, block_size)
    # At the end the policy keeps what it keeps without points.
    assert (plan.end.skip == at_end.end.skip).all() and (plan.end.keep == at_end.end.keep).all()
    tokens, behind = policy.chunk.tokens, max(policy.window, 2)
    points = [inner.computed for inner in plan.inner]
    assert points == list(range(points[0], n - behind + 1, tokens)) if points else True
    assert all(point % tokens == 0 for point in points)
    keep = max(policy.chunk.keep or tokens, plan.budget_tokens)
    if not points and plan.evicts:  # nothing to give before the end: less than a block
        last = (n - behind) // tokens * tokens
        assert last <= 0 or (_plan_of_inside(policy, last, keep, block_size).end.skip == 0).all()
    numbers = range(1, plan.end_number + 1)
    skips = [np.zeros(LAYERS, np.int32), *(plan.skip_after(number) for number in numbers)]
    for before, after in itertools.pairwise(skips):
        assert (after >= before).all(), "what was given back cannot be taken back"
    for inner in plan.inner:
        assert inner.skip.any() and not (inner.skip % block_size).any()
        assert inner.held.mean() >= min(keep, inner.computed) - 1
        assert (inner.held >= (policy.chunk.window or policy.window)).all()
    # The number of the latest eviction, by definition.
    ends = [plan.computed_at(number) for number in numbers]
    assert ends == [*points, n]
    for computed in {0, 1, n - 1, n, n + 5, *ends, *(end - 1 for end in ends)}:
        assert plan.evictions_by(computed) == sum(end <= computed for end in ends)
        later = [end for end in ends if end > computed]
        assert plan.next_eviction(computed) == (later[0] if plan.evicts and later else None) or (
            not plan.evicts
        )


def _plan_of_inside(policy: Policy, point: int, keep: int, block_size: int) -> RetentionPlan:
    from vllm_pyramid.plan import Budget

    assert policy.inner_policy is not None
    plan = policy.inner_policy.plan(point, LAYERS, block_size, Budget(tokens=keep))
    assert isinstance(plan, RetentionPlan)
    return plan


@settings(max_examples=60)
@given(policy=POLICIES, prompt_len=st.integers(1, 500), generated=st.integers(0, 60))
def test_the_peak_is_the_most_that_is_held(policy: Policy, prompt_len: int, generated: int) -> None:
    plan, total, size = _plan(policy, prompt_len), prompt_len + generated, 8
    held = []
    for computed in range(1, total + 1):
        # A step ends here: what was given back by an eviction before it is gone.
        skip = plan.skip_after(plan.evictions_by(computed - 1))
        held.append(int((-(-computed // size) - skip // size).sum()))
    peak = peak_blocks(plan, total, np.full(LAYERS, size))
    assert peak.shape == (LAYERS,) and int(peak.sum()) == max(held)


@pytest.mark.long
@settings(max_examples=60)
@given(policy=POLICIES, longest=st.integers(20, 400))
def test_the_worst_prompt_is_no_worse(policy: Policy, longest: int) -> None:
    """What the pool must have is enough for every prompt up to that length, and hardly more."""
    sizes = np.full(LAYERS, 8)
    most = max(int(peak_blocks(_plan(policy, n), n, sizes).sum()) for n in range(1, longest + 1))
    bound = int(peak_blocks_up_to(policy, longest, LAYERS, 8).sum())
    assert most <= bound <= most + 2 * LAYERS


@pytest.mark.parametrize(
    ("policy", "args", "message"),
    [
        ("xkv", {"chunk.tokens": 256}, "decides the lengths from the scores of a whole prompt"),
        ("full", {"chunk.tokens": 256}, "keeps every token"),
        ("random", {"chunk.tokens": 256}, "'random' needs positions"),
        ("snapkv", {"chunk.tokens": 32, "chunk.window": 64}, "at least 65"),
        ("scissorhands", {"chunk.tokens": 64, "chunk.keep": 200}, "looks back over 400 queries"),
        ("snapkv", {"chunk.keep": 64}, "set chunk.tokens too"),
    ],
)
def test_refused(policy: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(policy, None, args)


def test_what_the_parts_inside_ask_for() -> None:
    """Sums inside the prompt are gathered in every step; a history has its queries at the end."""
    sums = {"chunk.tokens": 256, "chunk.scorer": "accumulated_attention"}
    policy = load_policy("snapkv", 64, sums)
    assert policy.works_in_every_step and policy.why_not(Feature.PREFIX_CACHING)
    assert not load_policy("snapkv", 64, {"chunk.tokens": 256}).works_in_every_step
    history = load_policy("scissorhands", 64, {"chunk.tokens": 512, "schedule": "prompt_end"})
    for prompt_len in range(1424, 2000, 7):
        plan = _plan(history, prompt_len)
        assert plan.inner and prompt_len - plan.inner[-1].computed >= 400
    recent = load_policy("keydiff", 64, {"chunk.tokens": 64, "window": 32, "chunk.window": 0})
    for prompt_len in range(200, 300):
        assert prompt_len - _plan(recent, prompt_len).inner[-1].computed >= 32


# Requests that need more than the pool -----------------------------------------------------------


def _check(keys: dict[str, Any], prompt_len: int, max_tokens: int, **fields: Any) -> int:
    policy = load_policy("snapkv", 64, {"chunk": {"tokens": 64, "keep": 64}})
    pool = Pool(num_layers=2, block_size=16, blocks=24, max_model_len=1000)
    params = SimpleNamespace(max_tokens=max_tokens, min_tokens=0, **fields)
    check_fit(resolve(policy, RequestKeys.parse(keys)), prompt_len, params, pool)
    return params.max_tokens


def test_what_fits() -> None:
    # 64 kept, 64 computed, and the last chunk up to the window: 9 blocks of 12 in each layer.
    assert _check({}, 900, 50) == 50
    assert _check({"kv_policy": "full"}, 150, 40) == 40
    # With the whole length asked for, it ends when the pool is full.
    assert _check({"kv_policy": "full"}, 150, 850) == 12 * 16 - 150 + 1


@pytest.mark.parametrize(
    ("keys", "prompt_len", "max_tokens", "message"),
    [
        ({"kv_policy": "full"}, 193, 1, "193 tokens with policy 'full' .* 26 blocks.* has 24"),
        ({"kv_budget": "50%"}, 900, 1, "budget 50% holds up to"),
        ({"kv_policy": "full"}, 150, 60, "room for 43 tokens: lower max_tokens"),
        ({}, 500, 200, "lower max_tokens"),
    ],
)
def test_what_does_not_fit(keys, prompt_len, max_tokens, message) -> None:
    with pytest.raises(ValueError, match=message):
        _check(keys, prompt_len, max_tokens)
