# SPDX-License-Identifier: Apache-2.0
"""Plans of conversations: what is evicted where earlier turns ended, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.kv_cache.evicted_names import EvictedNames
from vllm_pyramid.plan import RetentionPlan, affordable, tokens_per_step
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.limits import FREE_EVICTIONS, TOKENS_PER_EVICTION
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys

LAYERS = 5


def _plan(
    policy: Policy, prompt_len: int, turns: tuple[int, ...], block_size: int = 8, **own: Any
) -> RetentionPlan:
    plan = policy.plan(prompt_len, LAYERS, block_size, turns=turns, **own)
    assert isinstance(plan, RetentionPlan)
    return plan


POLICIES = st.builds(
    lambda name, budget, floor: load_policy(name, budget, {"window": 4, "min_tokens": floor}),
    st.sampled_from(["pyramidkv", "snapkv", "pyramidkv-wide", "keydiff"]),
    st.sampled_from([16, 40, 100, "12%", "60%", "90%", "100%"]),
    st.sampled_from([0, 120]),
)
TURNS = st.lists(st.integers(1, 250), min_size=2, max_size=7).map(
    lambda lengths: tuple(np.cumsum(lengths).tolist())
)


@settings(max_examples=400)
@given(policy=POLICIES, ends=TURNS, block_size=st.sampled_from([1, 8, 16]))
def test_what_a_turn_leaves_is_what_the_next_one_finds(policy, ends, block_size) -> None:
    """Behind each turn's end every later turn holds what that turn's own request held there."""
    plans = [_plan(policy, end, ends[:index], block_size) for index, end in enumerate(ends)]
    last = plans[-1]
    for before, plan in itertools.pairwise(plans):
        ended = before.prompt_len
        assert (
            plan.skip_after(plan.evictions_by(ended)) == before.skip_after(before.end_number)
        ).all()
        for computed in range(1, ended, 7):
            one, other = plan.evictions_by(computed), before.evictions_by(computed)
            assert (plan.skip_after(one) == before.skip_after(other)).all()
    points = [inner.computed for inner in last.inner]
    assert set(points) <= set(ends[:-1])
    skips = [last.skip_after(number) for number in range(last.end_number + 1)]
    for number, (skip, later) in enumerate(itertools.pairwise(skips), 1):
        assert (later >= skip).all(), "what was given back cannot be taken back"
        assert (later > skip).any() == (number in last.giving)
        assert number in last.giving or number == last.end_number
        after = last.after(number)
        assert (after.keep <= after.held).all() and (after.held < after.keep + block_size).all()
    giving = [last.computed_at(number) for number in last.giving]
    for point, following in itertools.pairwise(giving):
        assert following - point >= policy.min_turn >= 32
    # A layer never has less than it would without the turns, unless it had less before.
    alone = _plan(policy, ends[-1], (), block_size)
    if last.end_number in last.giving:
        assert (last.end.skip == np.maximum(alone.end.skip, skips[-2])).all()


@given(
    ends=st.lists(st.integers(1, 60), max_size=60).map(lambda steps: np.cumsum(steps).tolist()),
    free=st.integers(0, 9),
    tokens=st.integers(1, 99),
)
def test_turns_pay_with_tokens(ends: list[int], free: int, tokens: int) -> None:
    answers = affordable(ends, free, tokens)
    for index in range(len(ends)):
        assert affordable(ends[:index], free, tokens) == answers[:index], "as the turn itself was"
        count = sum(answers[: index + 1])
        assert count <= free + ends[index] // tokens
        assert answers[index] or count == free + ends[index] // tokens
    assert all(answers[:free])


def test_many_short_turns_evict_once_in_a_while() -> None:
    """A conversation of the shortest turns that evict: all of the first 64, then few."""
    policy = load_policy("pyramidkv", 64, {"window": 4})
    ends = tuple(range(40, 40 * 401, 40))
    plan = _plan(policy, 16_040, ends)
    points = [inner.computed for inner in plan.inner]
    assert points[:63] == list(ends[1:64]), "nothing is evicted from the first"
    assert len(points) < FREE_EVICTIONS + 16_040 // TOKENS_PER_EVICTION
    gaps = np.diff([*points, 16_040])
    assert gaps[-1] <= gaps.max() <= TOKENS_PER_EVICTION + 40
    for count in range(60, 400, 13):
        before, end = _plan(policy, ends[count], ends[:count]), ends[count]
        assert (
            before.skip_after(before.end_number) == plan.skip_after(plan.evictions_by(end))
        ).all()
        most = 64 + 8 + 40 + TOKENS_PER_EVICTION
        assert before.end.held.mean() <= most, "its own end may have to wait, too"
    # Longer turns pay for themselves, however many they are.
    ends = tuple(range(TOKENS_PER_EVICTION, TOKENS_PER_EVICTION * 200, TOKENS_PER_EVICTION))
    assert len(_plan(policy, TOKENS_PER_EVICTION * 200, ends).inner) == 199


def test_steps_of_a_prompt() -> None:
    """On average at least, from any eviction on: short turns at the end make many small steps."""
    policy = load_policy("snapkv", 16, {"window": 4})
    plan = _plan(policy, 1160, (1000, 1040, 1080, 1120))
    assert [inner.computed for inner in plan.inner] == [1000, 1040, 1080, 1120]
    assert tokens_per_step(plan, 256) == (40, 256)
    assert tokens_per_step(plan, 16) == (13, 16), "40 tokens take three steps"
    assert tokens_per_step(_plan(policy, 1160, ()), 256) == (1160 // 5, 256)


def test_what_a_state_depends_on() -> None:
    """Keys of two requests are equal where the state is; each thing by itself makes another."""

    def keys(prompt_len: int, turns: list[int], policy: Policy, **own: Any) -> list[bytes]:
        served = resolve(policy, RequestKeys.parse({"kv_turns": turns, **own}))
        plan = served.plan(prompt_len, LAYERS, 8)
        found = EvictedNames.of(served, plan)
        return [] if found is None else list(found.keys.values())

    policy = load_policy("snapkv", 40, {"window": 4})
    first, second = keys(500, [200], policy)
    assert keys(200, [], policy) == [first]
    assert keys(800, [200, 500], policy)[:2] == [first, second]
    assert keys(500, [200], policy, kv_budget=40) == [first, second]
    assert keys(500, [200, 210], policy) == [first, second], "too short to be one"
    others = [
        *keys(200, [], policy, kv_budget=48),
        *keys(200, [], load_policy("snapkv", 40, {"window": 5})),
        *keys(200, [], load_policy("pyramidkv", 40, {"window": 4})),
        *keys(201, [], policy),
        keys(500, [300], policy)[1],
    ]
    assert len({first, second, *others}) == 2 + len(others)
    assert keys(30, [], policy) == [], "nothing is evicted from it"
    shares = load_policy("snapkv", "30%", {"window": 4})
    assert keys(500, [], shares) != keys(500, [], shares, kv_min_tokens=20)
    assert EvictedNames.of(resolve(policy, RequestKeys()), _plan(policy, 9, ())) is None
