# SPDX-License-Identifier: Apache-2.0
"""Spans that stay: how they are read, which policies can keep them, and whether they fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pyramid.plan import EvictionPoint
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.kept_spans import (
    check_spans_fit,
    flat,
    leading,
    merged,
    needed_tokens,
    only_leading,
    parse_spans,
)
from vllm_pyramid.policy.request import TEMPLATE_KEY, ServedRequest, for_request

pytestmark = pytest.mark.cpu

BOUNDS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6)


def served(policy: str, extra: dict[str, Any], budget: str | int | None = 64) -> ServedRequest:
    return for_request(load_policy(policy, budget), extra)


@pytest.mark.parametrize(
    ("value", "spans"),
    [
        (None, ()),
        ([], ()),
        ([0, 4], ((0, 4),)),
        ((3, 4, 4, 9, 20, 21), ((3, 4), (4, 9), (20, 21))),
    ],
)
def test_lists_of_spans(value: Sequence[int] | None, spans: tuple[tuple[int, int], ...]) -> None:
    assert parse_spans(value, "kv_keep") == spans
    assert flat(spans) == list(value or ())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0], "has 1 numbers, an odd number"),
        ([0, 0], "spans of at least one token"),
        ([4, 2], "spans of at least one token"),
        ([0, 5, 4, 8], "in order and apart"),
        ([-1, 5], "positions from 0 to"),
        ([0, 2**31], "positions from 0 to"),
        ([0, True], "list of whole numbers"),
        ([0, 4.0], "list of whole numbers"),
        ("0-4", "list of whole numbers, not '0-4'"),
        ([[0, 4]], "list of whole numbers"),
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


@given(
    bounds=BOUNDS,
    computed=st.integers(1, 90),
    front=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    recent=st.lists(st.integers(0, 90), min_size=3, max_size=3),
)
def test_needed_tokens_are_counted_once(
    bounds: list[tuple[int, int]], computed: int, front: list[int], recent: list[int]
) -> None:
    spans = merged((start, start + size) for start, size in bounds)
    point = EvictionPoint.of(
        computed,
        16,
        1,
        np.ones(3, np.int32),
        True,
        front=np.minimum(front, computed),
        recent=np.minimum(recent, computed),
    )
    expected = [
        len(
            {token for start, end in spans for token in range(start, end)} & set(range(computed))
            | set(range(point.front[layer]))
            | set(range(computed - point.recent[layer], computed))
        )
        for layer in range(3)
    ]
    assert needed_tokens(spans, point).tolist() == expected


@pytest.mark.parametrize(
    ("policy", "extra", "reason"),
    [
        ("xkv", {"kv_keep": [0, 4]}, "its lengths are solved"),
        ("h2o", {"kv_keep": [0, 4]}, "it also evicts generated tokens"),
        ("snapkv-chunked", {"kv_keep": [1, 4]}, "begin behind token 0: it evicts inside"),
        ("snapkv", {"kv_keep": [0, 4, 8, 9], "kv_turns": []}, "kv_turns: the conversation"),
    ],
)
def test_policies_that_cannot_keep_spans(policy: str, extra: dict[str, Any], reason: str) -> None:
    error = served(policy, extra).error
    assert error is not None and reason in error


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        ("snapkv-chunked", {"kv_keep": [0, 4]}),
        ("snapkv", {"kv_keep": [0, 4], "kv_turns": [20, 30]}),
        ("snapkv", {"kv_keep": [0, 4, 8, 9]}),
        ("full", {"kv_keep": [0, 4, 8, 9]}),
        ("snapkv", {"kv_keep": [0, 4, 8, 9], "kv_policy": "full", "kv_turns": None}),
    ],
)
def test_policies_that_can(policy: str, extra: dict[str, Any]) -> None:
    found = served(policy, extra, None)
    assert found.error is None and flat(found.keep) == extra["kv_keep"]


def test_a_templates_spans_join_the_requests_own() -> None:
    both = {"kv_keep": [3, 8], TEMPLATE_KEY: [0, 4, 20, 22]}
    assert served("snapkv", both).keep == ((0, 8), (20, 22))
    assert served("snapkv", {TEMPLATE_KEY: [0, 4, 20, 22]}).keep == ((0, 4), (20, 22))
    # Where a conversation is evicted again, what stands before the first message.
    assert served("snapkv", {TEMPLATE_KEY: [0, 4, 20, 22], "kv_turns": []}).keep == ((0, 4),)
    assert served("snapkv", {TEMPLATE_KEY: [2, 4], "kv_turns": [5]}).keep == ()
    full = {TEMPLATE_KEY: [0, 4, 20, 22], "kv_policy": "full"}
    assert served("snapkv", full).keep == ((0, 4), (20, 22))


def test_spans_must_fit_the_smallest_layer() -> None:
    policy = load_policy("pyramidkv", 64)
    plan = policy.plan(400, 8, 16)
    smallest, window = int(plan.estimate().end.keep.min()), policy.window
    assert smallest < 64
    room = smallest - window - policy.sinks
    for keep in ([], [100, 100 + room], [100, 101, 200, 199 + room], [399, 400]):
        check_spans_fit(for_request(policy, {"kv_keep": keep}), 400, 8, 16)
    check_spans_fit(for_request(policy, {"kv_keep": [0, smallest - window]}), 400, 8, 16)
    for keep in ([100, 101 + room], [0, smallest - window + 1], [0, 400]):
        with pytest.raises(ValueError, match=f"smallest layer keeps {smallest}: ask for a larger"):
            check_spans_fit(for_request(policy, {"kv_keep": keep}), 400, 8, 16)
    with pytest.raises(ValueError, match="ends at token 401, and the prompt has 400"):
        check_spans_fit(for_request(policy, {"kv_keep": [0, 401]}), 400, 8, 16)
    whole = for_request(policy, {"kv_keep": [0, 400], "kv_policy": "full"})
    check_spans_fit(whole, 400, 8, 16)
    check_spans_fit(for_request(policy, {"kv_keep": [0, 60]}), 60, 8, 16)  # kept whole


def test_spans_must_fit_every_eviction() -> None:
    """An earlier turn's end keeps a share of what was there."""
    policy = load_policy("snapkv", "25%", {"min_tokens": 0, "window": 8})
    keep = {"kv_keep": [0, 60], "kv_turns": [200]}
    with pytest.raises(ValueError, match=r"60 of the first 200 tokens, 68 .* layer keeps 50"):
        check_spans_fit(for_request(policy, keep), 400, 8, 16)
    check_spans_fit(for_request(policy, {"kv_keep": [0, 60], "kv_turns": []}), 400, 8, 16)
