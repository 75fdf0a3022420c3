# SPDX-License-Identifier: Apache-2.0
"""Evictions after the prompt's end: when they come, what they keep, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pyramid.plan import EvictionPoint, IntArray, LevelPlan, RetentionPlan
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.schedules import IntervalSchedule


def plan_of(policy: str, budget: Any, args: dict[str, Any], *where: int) -> RetentionPlan:
    plan = load_policy(policy, budget, args).plan(*where)
    assert isinstance(plan, RetentionPlan)
    return plan


@given(
    prompt_len=st.integers(1, 400),
    budget=st.one_of(st.integers(1, 300), st.sampled_from(["1%", "12%", "100%"])),
    interval=st.integers(1, 100),
    fill_blocks=st.booleans(),
    allocator=st.sampled_from(["uniform", "arithmetic"]),
    layers=st.integers(1, 9),
    block_size=st.sampled_from([1, 8, 16]),
)
def test_every_eviction_keeps_its_budget(
    prompt_len: int,
    budget: int | str,
    interval: int,
    fill_blocks: bool,
    allocator: str,
    layers: int,
    block_size: int,
) -> None:
    """Sums are conserved, nothing comes back, nobody keeps what is gone, blocks are whole."""
    args = {"interval": interval, "fill_blocks": fill_blocks, "allocator": allocator}
    plan = plan_of("h2o", budget, args, prompt_len, layers, block_size)
    target = int(budget) if isinstance(budget, int) else max(plan.budget_tokens, 1)
    before = np.zeros(layers, np.int32)
    assert plan.evicts and not plan.skip_after(0).any()
    for number in range(1, 12):
        computed = plan.computed_at(number)
        assert computed == prompt_len + (number - 1) * interval
        now = plan.after(number)
        assert now.computed == computed and now.block_size == block_size
        assert now.keep.sum() == min(target, computed) * layers
        assert (now.skip == plan.skip_after(number)).all()
        assert (now.skip >= before).all(), "a layer would have to keep what is gone"
        unit = block_size if fill_blocks else 1
        assert (now.skip == (computed - now.keep) // unit * unit).all()
        assert (now.held - now.keep < unit).all() and (now.held >= now.keep).all()
        assert (now.recent == now.keep // 2).all()
        assert plan.evictions_by(computed) == number
        assert plan.evictions_by(computed - 1) == number - 1
        assert plan.next_eviction(computed - 1) == computed
        before = now.skip


@given(
    prompt_len=st.integers(0, 400),
    budget=st.integers(9, 300),
    interval=st.integers(8, 100),
    allocator=st.sampled_from(["uniform", "arithmetic"]),
    layers=st.integers(1, 9),
    name=st.sampled_from(["h2o", "r-kv", "streaming-llm"]),
)
def test_a_prompt_that_stays_is_held_beside_the_budget(
    prompt_len: int, budget: int, interval: int, allocator: str, layers: int, name: str
) -> None:
    """Its blocks are never written to, and answers keep what prompts of their length would."""
    args = {"schedule": {"kind": "interval", "interval": interval, "prompt": "keep"}}
    args |= {"allocator": allocator, "sinks": 0}
    plan = plan_of(name, budget, args, prompt_len, layers, 16)
    blocks = prompt_len // 16 * 16
    assert plan.untouched == plan.in_place == blocks and plan.evicts
    assert plan.exact_tokens == prompt_len and not plan.end.skip.any()
    before = plan.end.skip
    for number in range(2, 12):
        point, answer = plan.after(number), (number - 1) * interval
        assert point.computed == plan.computed_at(number) == prompt_len + answer
        assert point.keep.sum() == (prompt_len + min(budget, answer)) * layers
        assert (point.front == prompt_len).all() and point.in_place == blocks
        assert (point.held - prompt_len >= np.minimum(point.keep - prompt_len, answer)).all()
        assert (point.held - point.keep < 16).all() and not (point.skip % 16).any()
        assert (point.skip >= before).all(), "a layer would have to keep what is gone"
        assert (point.recent <= point.keep - prompt_len).all()
        assert point.budget_tokens == min(budget, answer) and point.protected == prompt_len
        before = point.skip
    # Neither spans nor turns of a prompt change a plan that keeps all of it.
    policy = load_policy(name, budget, args)
    assert policy.plan(prompt_len, layers, 16, spans=((0, 5),)).untouched == blocks


class Groups(IntervalSchedule):
    """As PyramidInfer: the prompt's tokens stay, a share of what is generated is added to them."""

    kind: str = "test"  # type: ignore[assignment]

    def keep(self, prompt: EvictionPoint, computed: int, usual: EvictionPoint) -> IntArray:
        groups = (computed - prompt.computed) // self.interval
        rates = np.linspace(0.8, 0.2, len(prompt.keep))
        return prompt.keep + groups * np.floor(rates * self.interval).astype(np.int32)

    def front(self, prompt: EvictionPoint, computed: int) -> IntArray:
        return self.keep(prompt, computed - self.interval, prompt)


def test_a_schedule_may_set_lengths_and_protect_tokens() -> None:
    policy = load_policy("h2o", 40, {"fill_blocks": False})
    kind = f"{Groups.__module__}:Groups"
    policy = policy.model_copy(update={"schedule": {"kind": kind, "interval": 16}})
    plan = policy.plan(100, 3, 16)
    assert isinstance(plan, RetentionPlan)
    assert plan.after(3).keep.tolist() == [64, 56, 46]
    assert plan.after(3).front.tolist() == [52, 48, 43]
    assert plan.after(3).budget_tokens == 56  # rounded up
    assert (plan.skip_after(3) >= plan.skip_after(2)).all()


@pytest.mark.parametrize(
    ("policy", "args", "message"),
    [
        ("snapkv", {"schedule": "interval"}, "has no scores during generation"),
        ("snapkv", {"recent": 0.5}, "set `window` instead"),
        ("scissorhands", {"queries": 513}, "looks back over 513 queries but evicts every 512"),
        ("h2o", {"recent": 1.0}, "less than 1"),
        ("xkv", {"schedule": "pressure"}, "`allocator: global` cannot evict later"),
        ("snapkv", {"schedule": "pressure", "schedule.levels": ["25%", "50%"]}, "that fall"),
        (
            "snapkv",
            {"schedule": "pressure", "schedule.levels": [f"{n / 4}%" for n in range(300, 46, -1)]},
            "at most 253 items",
        ),
        ("h2o", {"schedule.prompt": "keep", "fill_blocks": False}, "moves tokens by less than a"),
        ("h2o", {"schedule.prompt": "keep", "chunk.tokens": 512}, "`chunk: points` was not tried"),
        (
            "r-kv",
            {"schedule": "prompt_end", "chunk.tokens": 64, "chunk.scorer": None},
            "choose another chunk.scorer",
        ),
        ("snapkv", {"schedule": "pressure", "schedule.answers": 7}, "7 is less than the window"),
    ],
)
def test_what_is_refused(policy: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(policy, None, args)


@pytest.mark.parametrize("name", ["r-kv", "triattention"])
def test_a_share_of_a_prompt_that_stays_means_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=r"25% is a share of the prompt: give the number of gen"):
        load_policy(name, "25%")


def test_prompts_that_stay_are_shared() -> None:
    """What scorers refuse for shared prompts, and schedules for protected ones, is lifted."""
    refused = Feature.PREFIX_CACHING, Feature.KV_KEEP
    evicting, keeping = load_policy("h2o"), load_policy("h2o", None, {"schedule.prompt": "keep"})
    assert all(evicting.why_not(one) is not None for one in refused)
    assert all(keeping.why_not(one) is None for one in refused)
    assert "keeps prompts whole" in str(keeping.why_not(Feature.KV_TURNS))
    assert "adds up" in str(keeping.why_not(Feature.HOST_CACHE))
    assert load_policy("r-kv").why_not(Feature.HOST_CACHE) is None
    assert keeping.min_last_chunk == load_policy("r-kv").min_last_chunk == 1
    assert load_policy("r-kv", None, {"schedule.prompt": "evict"}).min_last_chunk == 8


@given(
    prompt_len=st.integers(0, 2000),
    budget=st.one_of(st.integers(17, 600), st.sampled_from(["1%", "12%", "30%", "100%"])),
    levels=st.sets(st.sampled_from(["90%", "60%", "50%", "25%", "20%"])),
    headroom=st.sampled_from([1.0, 1.5, 3.0]),
    allocator=st.sampled_from(["uniform", "arithmetic"]),
    layers=st.integers(1, 9),
)
def test_levels_are_nested_and_end_at_the_floor(
    prompt_len: int,
    budget: int | str,
    levels: set[str],
    headroom: float,
    allocator: str,
    layers: int,
) -> None:
    """An order to each level is an eviction to its budget; the last one is the policy's own."""
    args = {"allocator": allocator, "window": 16}
    falling = sorted(levels, reverse=True)
    under_pressure = {"schedule": "pressure", "schedule.levels": falling}
    under_pressure |= {"schedule.headroom": headroom}
    policy = load_policy("snapkv", budget, {**args, **under_pressure})
    plan, always = (
        policy.plan(prompt_len, layers, 16),
        plan_of("snapkv", budget, args, prompt_len, layers, 16),
    )
    if not always.evicts:
        assert not plan.evicts and not plan.waits_for_orders
        return
    assert isinstance(plan, LevelPlan) and plan.evicts and plan.untouched is None
    assert not plan.skip_after(plan.evictions_by(prompt_len + 100)).any()
    skips = [level.skip for level in plan.levels]
    assert (skips[-1] == always.end.skip).all() and len(skips) <= 2 + len(levels)
    for before, after in pairwise([plan.end.skip, *skips]):
        assert (before <= after).all() and (before < after).any()
    counted = int(headroom * always.end.budget_tokens)
    *every, near = [
        load_policy("snapkv", one, args).plan(prompt_len, layers, 16).end.skip
        for one in (*falling, counted)
    ]
    # Also where it keeps the whole prompt: such a request is counted whole.
    counts = near if (near <= skips[-1]).all() else skips[-1]
    assert (plan.counted().end.skip == counts).all()
    assert all(any((skip == one).all() for one in [*every, near]) for skip in skips[:-1])
    ordered = plan.ordered([(prompt_len, level) for level in range(len(skips))])
    for number, skip in enumerate(skips, 1):
        assert (ordered.skip_after(number) == skip).all()
    assert ordered.evictions_by(prompt_len) == len(skips)
    assert ordered.next_eviction(prompt_len) is None
    assert (plan.estimate().end.skip == skips[-1]).all()


@given(
    prompt_len=st.integers(1, 900),
    answers=st.integers(16, 300),
    budget=st.sampled_from([40, "12%", "30%"]),
    given=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=6),
    computed=st.integers(0, 2000),
)
def test_orders_of_answers_never_give_a_slot_twice(
    prompt_len: int, answers: int, budget: int | str, given: list[tuple[int, int]], computed: int
) -> None:
    """An order of a later point keeps what a prompt of that length would, or what was left."""
    args = {"allocator": "arithmetic", "window": 16, "schedule": "pressure"}
    policy = load_policy("snapkv", budget, {**args, "schedule.answers": answers})
    plan = policy.plan(prompt_len, 5, 16)
    assert isinstance(plan, LevelPlan) and plan.evicts, "answers may be evicted in any case"
    orders: list[tuple[int, int]] = []
    for count, level in sorted(given):
        point = prompt_len + count * answers
        assert plan.point_by(point) == plan.point_by(point + answers - 1) == point
        if level < len(plan.levels_at(point)) and (point, level) not in orders:
            orders.append((point, level))
    if not orders:
        return
    ordered = plan.ordered(orders)
    assert ordered.end_number == len(orders) and not ordered.every
    skip = np.zeros(5, np.int32)
    for number, (point, level) in enumerate(orders, 1):
        alone = policy.plan(point, 5, 16)
        assert isinstance(alone, LevelPlan)
        found = ordered.after(number)
        assert (found.skip == np.maximum(alone.levels[level].skip, skip)).all()
        assert found.computed == point and (found.skip % 16 == 0).all()
        assert (found.keep <= found.held).all() and found.keep.min() >= 16
        assert found.budget_tokens == -(-int(found.keep.sum()) // 5)
        skip = found.skip
    assert not plan.estimate().every, "whoever starts again holds all of it first"
    counted = plan.counted()
    assert (
        counted.skip_after(counted.evictions_by(prompt_len + computed)) <= computed + prompt_len
    ).all()
    assert counted.every == answers and counted.prompt_len == prompt_len
