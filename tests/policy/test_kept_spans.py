# SPDX-License-Identifier: Apache-2.0
"""Spans that stay: how they are read, which policies can keep them, and what is kept with them."""

from __future__ import annotations

import itertools
from ast import literal_eval
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from vllm_pyramid.plan import EvictionPoint, LevelPlan, RetentionPlan
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.fit import Pool, check_fit
from vllm_pyramid.policy.kept_spans import (
    Spans,
    check_spans,
    flat,
    leading,
    merged,
    only_leading,
    parse_spans,
)
from vllm_pyramid.policy.request import TEMPLATE_KEY, ServedRequest, for_request

LAYERS = 5
BOUNDS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6)


def served(policy: str, extra: dict[str, Any], budget: str | int | None = 64) -> ServedRequest:
    return for_request(load_policy(policy, budget), extra)


@cache
def loaded(name: str, budget: str | int, args: str) -> Policy:
    """Load a policy once for all examples."""
    return load_policy(name, budget, literal_eval(args))


@pytest.mark.parametrize(
    ("value", "spans"),
    [(None, ()), ([], ()), ([0, 4], ((0, 4),)), ((3, 4, 4, 9, 20, 21), ((3, 4), (4, 9), (20, 21)))],
)
def test_lists_of_spans(value: Sequence[int] | None, spans: tuple[tuple[int, int], ...]) -> None:
    assert parse_spans(value, "kv_keep") == spans
    assert flat(spans) == list(value or ())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, 0], "spans of at least one token"),
        ([0, 5, 4, 8], "in order and apart"),
        ([-1, 5], "positions from 0 to"),
        ([0, 2**31], "positions from 0 to"),
        ([0, 4.0], "list of whole numbers"),
    ],
)
def test_wrong_lists(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spans(value, "kv_keep")


@given(bounds=BOUNDS)
def test_merged_spans_have_the_same_tokens(bounds: list[tuple[int, int]]) -> None:
    spans = [(start, start + size) for start, size in bounds]
    tokens = {token for start, end in spans for token in range(start, end)}
    found = merged(spans)
    assert [token for start, end in found for token in range(start, end)] == sorted(tokens)
    assert all(before[1] < later[0] for before, later in itertools.pairwise(found))
    assert leading(found) == next(n for n in range(200) if n not in tokens)
    assert only_leading(found) == (found[:1] if 0 in tokens else ())


def test_a_templates_spans_join_the_requests_own() -> None:
    both = {"kv_keep": [3, 8], TEMPLATE_KEY: [0, 4, 20, 22]}
    assert served("snapkv", both).keep == ((0, 8), (20, 22))
    assert served("snapkv", {TEMPLATE_KEY: [0, 4, 20, 22]}).keep == ((0, 4), (20, 22))
    # Where a conversation is evicted again, what stands before the first message.
    assert served("snapkv", {TEMPLATE_KEY: [0, 4, 20, 22], "kv_turns": []}).keep == ((0, 4),)
    assert served("snapkv", {TEMPLATE_KEY: [2, 4], "kv_turns": [5]}).keep == ()
    full = {TEMPLATE_KEY: [0, 4, 20, 22], "kv_policy": "full"}
    assert served("snapkv", full).keep == ((0, 4), (20, 22))


def test_spans_lie_inside_the_prompt() -> None:
    for spans in ((), ((0, 400),), ((3, 5), (399, 400))):
        check_spans(spans, 400)
    with pytest.raises(ValueError, match="ends at token 401, and the prompt has 400"):
        check_spans(((0, 4), (399, 401)), 400)


def protected(policy: Policy, spans: Spans, end: int, recent: int = 0) -> set[int]:
    """Tokens that have to stay at an eviction after `end` tokens."""
    return {
        *(token for start, stop in spans for token in range(start, min(stop, end))),
        *range(min(policy.sinks, end)),
        *range(max(end - max(policy.window, recent), 0), end),
    }


def check_point(policy: Policy, spans: Spans, point: EvictionPoint, rest: EvictionPoint) -> None:
    """The point keeps what `rest` keeps of the other tokens, and has room for all that stays.

    Args:
        rest: of a prompt without the tokens of spans that are neither sinks nor in the window.
    """
    fixed = len(protected(policy, (), point.computed))
    beside = len(protected(policy, spans, point.computed)) - fixed
    assert (point.computed, point.protected) == (rest.computed + beside, beside)
    assert point.budget_tokens == rest.budget_tokens
    assert point.keep.tolist() == (rest.keep + beside).tolist()
    assert point.skip.tolist() == rest.skip.tolist()
    for layer, keep in enumerate(point.keep.tolist()):
        assert keep <= point.held[layer] <= point.computed
        stays = protected(policy, spans, point.computed, int(point.recent[layer]))
        assert len(stays) <= keep or not spans  # or recent tokens go before sinks


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {"window": 8, "sinks": 3}),
    ("snapkv", {"window": 8, "fill_blocks": False}),
    ("pyramidkv", {"window": 8}),
    ("auto", {}),
    ("keydiff", {"window": 0, "sinks": 4, "selector": {"kind": "top_k", "recent": 0.97}}),
]
BUDGETS = st.sampled_from(["3%", "12%", "50%", "100%", 60, 100, 1000])


@given(bounds=BOUNDS, own=st.sampled_from(POLICIES), budget=BUDGETS, tokens=st.integers(1, 400))
@example(bounds=[(0, 400)], own=POLICIES[0], budget="12%", tokens=400)
@example(bounds=[(0, 340)], own=POLICIES[2], budget="12%", tokens=400)
@example(bounds=[(0, 2)], own=POLICIES[4], budget="3%", tokens=40)
def test_spans_are_kept_beside_the_budget_of_the_rest(bounds, own, budget, tokens) -> None:
    name, args = own
    policy = loaded(name, budget, repr({"min_tokens": 20, **args}))
    spans = merged((start, min(start + size, tokens)) for start, size in bounds if start < tokens)
    served = for_request(policy, {"kv_keep": flat(spans)})
    plan, rest_len = served.plan(tokens, LAYERS, 16), tokens - served.protected_tokens(tokens)
    assert plan is served.plan(tokens, LAYERS, 16), "computed once"
    rest = policy.plan(rest_len, LAYERS, 16)
    assert isinstance(plan, RetentionPlan) and isinstance(rest, RetentionPlan)
    check_point(policy, spans, plan.end, rest.end)
    mean = policy.budget.with_floor(20).tokens_for(rest_len, policy.min_budget)
    assert plan.end.keep.sum() == LAYERS * (mean + served.protected_tokens(tokens))
    if not spans:
        assert plan is policy.plan(tokens, LAYERS, 16)


@given(first=st.integers(1, 500), turns=st.sets(st.integers(1, 599), max_size=5), budget=BUDGETS)
@example(first=300, turns={100, 290, 310, 500}, budget="12%")
def test_the_first_span_stays_at_each_turn(first: int, turns: set[int], budget: str | int) -> None:
    """Each turn's end keeps the budget of what the span has not; nothing is taken back."""
    policy = loaded("pyramidkv", budget, repr({"min_tokens": 20, "window": 8}))
    ends = sorted(turns)
    served = for_request(policy, {"kv_keep": [0, first], "kv_turns": ends})
    plan = served.plan(600, LAYERS, 16)
    assert isinstance(plan, RetentionPlan)
    before = np.zeros(LAYERS, np.int32)
    for point in plan.points:
        alone = for_request(policy, {"kv_keep": [0, min(first, point.computed)]})
        usual = alone.plan(point.computed, LAYERS, 16).estimate().end
        assert (point.skip >= before).all() and point.protected == usual.protected
        assert set(point.skip.tolist()) <= {*usual.skip.tolist(), *before.tolist()}
        stays = protected(policy, served.keep, point.computed)
        assert (point.held >= len(stays)).all() and (point.keep >= len(stays)).all()
        before = point.skip
    # A later turn makes the same evictions, so it goes on where this one ended.
    later = served._replace(turns=(*ends, 600)).plan(900, LAYERS, 16)
    assert isinstance(later, RetentionPlan)
    for point, other in zip(plan.points[:-1], later.points, strict=False):
        assert point.computed == other.computed and (point.skip == other.skip).all()


@given(first=st.integers(1, 1500), tokens=st.integers(100, 2000))
@example(first=700, tokens=2000)
def test_the_first_span_stays_at_evictions_inside_the_prompt(first: int, tokens: int) -> None:
    args = {"chunk": {"tokens": 256, "keep": 128, "window": 4}, "window": 8, "sinks": 2}
    policy = loaded("pyramidkv", 64, repr(args))
    inner = policy.inner_policy
    assert inner is not None
    served = for_request(policy, {"kv_keep": [0, min(first, tokens)]})
    plan = served.plan(tokens, LAYERS, 16)
    assert isinstance(plan, RetentionPlan)
    for point in plan.points:
        part = policy if point is plan.end else inner
        stays = protected(part, served.keep, point.computed)
        assert (point.keep >= len(stays)).all()
        assert point.protected == len(stays) - len(protected(part, (), point.computed))
    assert plan.end.budget_tokens == min(64, tokens - plan.end.protected)
    for point in plan.inner:
        assert point.budget_tokens == 128 and point.computed % 256 == 0
        assert point.computed > 128 + point.protected, "nothing to give back"
        assert point.held.sum() <= LAYERS * (128 + point.protected + 15)


def test_each_level_keeps_a_share_of_the_rest() -> None:
    policy = load_policy("snapkv", "12%", {"window": 16, "schedule": "pressure"})
    served = ServedRequest(policy, keep=((100, 300), (900, 1000)))
    plan, rest = served.plan(1000, 4, 16), policy.plan(1000 - 284, 4, 16)
    assert isinstance(plan, LevelPlan) and isinstance(rest, LevelPlan)
    assert len(plan.levels) == len(rest.levels) == 4 and plan.end.protected == 284
    for level, usual in zip(plan.levels, rest.levels, strict=True):
        check_point(policy, served.keep, level, usual)
    assert [level.budget_tokens for level in plan.levels] == [358, 179, 129, 86]


def test_a_prompt_that_spans_fill_does_not_fit_and_says_so() -> None:
    """Longer prompts than the pool are for policies that evict inside them."""
    args = {"chunk": {"tokens": 256, "keep": 128, "window": 4}, "window": 8}
    policy = load_policy("snapkv", 64, args)
    pool, params = Pool(4, 16, 4 * 64, 4096), SamplingParams(max_tokens=1)
    fits = for_request(policy, {"kv_keep": [0, 600]})
    check_fit(fits, 4000, params, pool)
    refused = for_request(policy, {"kv_keep": [0, 1100]})
    message = (
        "4000 tokens .* budget 64, and 1100 tokens that stay beside it .* holds up to 372 blocks, "
        "and the pool has 256: .* a smaller kv_budget or shorter spans"
    )
    with pytest.raises(ValueError, match=message):
        check_fit(refused, 4000, params, pool)
