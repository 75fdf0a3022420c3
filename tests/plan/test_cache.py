# SPDX-License-Identifier: Apache-2.0
"""Caches bounded by bytes: what they keep, what they drop, and that sizes are not understated."""

from __future__ import annotations

import tracemalloc
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pyramid.plan import Plan, RetentionPlan
from vllm_pyramid.plan.cache import cached_by_bytes, size_of
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.limits import CACHE_BYTES
from vllm_pyramid.policy.planning import plan_prompt
from vllm_pyramid.policy.request import _with_keys


@given(st.lists(st.integers(0, 9), max_size=80))
def test_equal_arguments_get_the_same_object_while_it_is_kept(calls: list[int]) -> None:
    """As a list of the latest uses says, whose sizes never exceed the bound."""
    made: list[int] = []

    @cached_by_bytes(9000)
    def zeros(number: int) -> np.ndarray:
        made.append(number)
        return np.zeros(number * 100)

    sizes = {n: 300 + size_of((n,)) + size_of(np.zeros(n * 100)) for n in range(10)}
    kept: dict[int, np.ndarray] = {}
    for number in calls:
        known, before = number in kept, len(made)
        found = zeros(number)
        assert len(made) == before + (not known)
        assert not known or found is kept[number]
        kept.pop(number, None)
        if sizes[number] <= 9000:
            kept[number] = found
        while sum(sizes[n] for n in kept) > 9000:
            kept.pop(next(iter(kept)))
        assert zeros.cached.currsize == sum(sizes[n] for n in kept) <= 9000


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    @cached_by_bytes(1000)
    def large(length: int) -> bytes:
        return b"x" * length

    @cached_by_bytes(1000)
    def of_text(text: str) -> int:
        return len(text)

    assert of_text("x" * 1000) == 1000 and not of_text.cached
    assert of_text("x") == 1 and len(of_text.cached) == 1
    assert large(3) is large(3)


def test_threads_get_one_object() -> None:
    found: list[object] = []

    @cached_by_bytes(1 << 20)
    def make(number: int) -> list[int]:
        return [number]

    threads = [Thread(target=lambda: found.append(make(7))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


def _use(plan: Plan) -> None:
    """Compute everything that a plan computes when it is asked for."""
    for part in (plan, *(plan.points if isinstance(plan, RetentionPlan) else ()), *plan.pieces):
        for cls in type(part).__mro__:
            for name, what in vars(cls).items():
                if type(what).__name__ == "cached_property":
                    getattr(part, name)


@pytest.mark.parametrize("name", ["pyramidkv", "pyramidkv-chunked", "pyramidinfer", "xkv", "turns"])
@pytest.mark.parametrize("num_layers", [4, 80])
def test_sizes_of_plans_are_not_understated(name: str, num_layers: int) -> None:
    policy = load_policy("snapkv" if name == "turns" else name)
    turns = tuple(range(500, 50_000, 400)) if name == "turns" else ()
    _use(policy.plan(60_000, num_layers, 16, turns=turns))
    tracemalloc.start()
    plans = [policy.plan(59_999 - index, num_layers, 16, turns=turns) for index in range(20)]
    for plan in plans:
        _use(plan)
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    counted = sum(size_of(plan) for plan in plans)
    # Points and their keys are in a cache of their own, too, and in both caches' entries.
    assert measured < 2 * counted + 20 * 4 * 1500, (measured, counted)
    assert counted < 4 * measured


def test_hostile_requests_do_not_fill_the_memory() -> None:
    policy = load_policy("snapkv", 512)
    for index in range(60):
        turns = tuple(range(600 + index, 60_000, 117))
        policy.plan(60_500, 80, 16, turns=turns)
    assert 0 < plan_prompt.cached.currsize <= CACHE_BYTES
    assert len(plan_prompt.cached) < 60
    served = load_policy("kcache")
    policies = [_with_keys(served, (("kv_top_n", number),)) for number in range(1, 40)]
    assert _with_keys(served, (("kv_top_n", 39),)) is policies[-1]
    sizes = [size for _, size in (_with_keys.cached[key] for key in _with_keys.cached)]
    assert min(sizes) > 8000, "both policies count"
