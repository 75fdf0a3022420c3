# SPDX-License-Identifier: Apache-2.0
"""Allocators: conserved sums, bounds, order, and the formulas of the papers."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.methods.curves import SharesAllocator, UniformAllocator, share_out
from vllm_pyramid.policy.allocator import Allocator, CurveAllocator, Reals, round_all_to_sum
from vllm_pyramid.policy.kinds import built_in_kinds, parse_component

CURVES = {
    kind for kind, cls in built_in_kinds(Allocator).items() if issubclass(cls, CurveAllocator)
}


def rounded(curve: Reals, total: int) -> list[int]:
    found: list[int] = round_all_to_sum(curve[None], np.array([total]))[0].tolist()
    return found


def curve_of(section: object) -> CurveAllocator:
    allocator = parse_component(Allocator, section)
    assert isinstance(allocator, CurveAllocator)
    return allocator


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, int]:
    """(B, m, C) with 0 <= B <= C; often B next to 0 or to C."""
    capacity = draw(st.one_of(st.integers(0, 40), st.integers(0, 2_000_000)))
    mean = draw(
        st.one_of(
            st.integers(0, capacity),
            st.integers(max(0, capacity - 3), capacity),
            st.integers(0, min(3, capacity)),
        )
    )
    return mean, draw(st.integers(1, 130)), capacity


@st.composite
def allocators(draw: st.DrawFn) -> CurveAllocator:
    kind = draw(st.sampled_from(sorted(CURVES - {"shares"})))
    if kind == "uniform":
        return curve_of(kind)
    beta = draw(st.one_of(st.floats(1.0, 64.0), st.sampled_from([1.0, 1.0 + 1e-12, 20.0, 1e6])))
    return curve_of({"kind": kind, "beta": beta})


@settings(max_examples=400)
@given(allocators(), problems())
def test_sum_bounds_and_order(allocator: CurveAllocator, problem: tuple[int, int, int]) -> None:
    mean, num_layers, capacity = problem
    tokens = allocator.allocate(mean, num_layers, capacity)
    assert tokens.shape == (num_layers,)
    assert int(tokens.sum()) == mean * num_layers
    assert tokens.min() >= 0
    assert tokens.max() <= capacity
    assert (np.diff(tokens) <= 0).all()


@settings(max_examples=200)
@given(
    st.one_of(allocators(), st.lists(st.sampled_from([0.0, 1e-9, 0.5, 1.0, 7.0]), min_size=1)),
    st.lists(problems(), min_size=1, max_size=9),
)
def test_several_prompts_at_once(allocator, found) -> None:
    """Turns are planned together, and each as the prompt that ended there was: bit by bit."""
    num_layers = found[0][1]
    if isinstance(allocator, list):
        allocator, num_layers = SharesAllocator(shares=(*allocator, 1.0)), len(allocator) + 1
    means, capacities = np.array([[mean, capacity] for mean, _, capacity in found]).T
    together = allocator.allocate_all(means, num_layers, capacities)
    alone = [allocator.allocate(mean, num_layers, most) for mean, _, most in found]
    assert together.dtype == np.int64 and (together == np.stack(alone)).all()


def test_a_class_that_overrides_one_curve_is_asked_for_each() -> None:
    class Falling(UniformAllocator):
        kind: str = "falling"  # type: ignore[assignment]

        def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
            return mean + np.linspace(1.0, -1.0, num_layers)

    falling = Falling()
    assert falling.allocate(5, 3, 9).tolist() == [6, 5, 4]
    found = falling.allocate_all(np.array([5, 7]), 3, np.array([9, 9]))
    assert found.tolist() == [[6, 5, 4], [8, 7, 6]]


def paper_sequence(mean: int, num_layers: int, capacity: int, beta: int) -> list[Fraction]:
    """PyramidKV's sec. 4.2.1 in exact arithmetic, written from the paper alone."""
    total = Fraction(mean * num_layers)
    top = total / (beta * num_layers)
    bottom = 2 * total / num_layers - top
    if bottom > capacity:
        bottom = Fraction(capacity)
        top = 2 * Fraction(mean) - bottom
    step = (bottom - top) / (num_layers - 1)
    return [bottom - step * layer for layer in range(num_layers)]


@pytest.mark.parametrize("num_layers", [2, 3, 8, 32, 80])
@pytest.mark.parametrize(
    ("mean", "prompt_len"),
    [
        (mean, prompt_len)
        for mean in (1, 7, 56, 120, 504, 2040)
        for prompt_len in (600, 2049, 2100, 4095, 8192)
        if mean < prompt_len - 8
    ],
)
@pytest.mark.parametrize("beta", [1, 14, 20])
def test_arithmetic_is_the_papers(mean: int, num_layers: int, prompt_len: int, beta: int) -> None:
    capacity = prompt_len - 8
    expected = paper_sequence(mean, num_layers, capacity, beta)
    assert sum(expected) == mean * num_layers
    tokens = curve_of({"kind": "arithmetic", "beta": float(beta)}).allocate(
        mean, num_layers, capacity
    )
    assert all(abs(int(t) - e) < 1 for t, e in zip(tokens, expected, strict=True))


def test_rounding_gives_ties_to_the_lower_layer() -> None:
    assert rounded(np.array([2.5, 2.5, 2.5, 2.5]), 10) == [3, 3, 2, 2]
    assert rounded(np.array([2.9999999999, 1.0, 0.0000000001]), 4) == [3, 1, 0]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("aritmetic", "did you mean 'arithmetic'.*valid kinds: arithmetic, decay, global"),
        ({"kind": "uniform", "beta": 3.0}, "unknown key 'beta' in allocator 'uniform'"),
        ({"kind": "arithmetic", "beta": 0.9}, "greater than or equal to 1"),
        ({"kind": "shares", "shares": [1.0, True]}, "valid number"),
        ({"kind": "global", "retention": 1.1}, "less than or equal to 1"),
    ],
)
def test_bad_sections(section: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_component(Allocator, section)


# Shares ------------------------------------------------------------------------------------------

WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.floats(0.0, 1e-6)), min_size=1, max_size=40
)


def test_the_tiniest_weight_takes_all_that_is_left() -> None:
    """Beside a full layer the smallest number there is counts as a whole one."""
    for weight in (5e-324, 1e-300, 1.0):
        assert share_out(np.array([1.0, weight]), 3, 3, 0.75).tolist() == [3.0, 3.0]


@settings(max_examples=400)
@given(WEIGHTS, st.data())
def test_what_is_shared_out(weights: list[float], data: st.DataObject) -> None:
    """Bounds and sum hold, and layers below the capacity stand in the ratio of their weights."""
    capacity = data.draw(st.one_of(st.integers(0, 40), st.integers(0, 100_000)))
    mean = data.draw(st.one_of(st.integers(0, capacity), st.just(capacity)))
    floor = mean * data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    curve = share_out(np.array(weights), mean, capacity, floor)
    total = mean * len(weights)
    assert curve.min() >= floor - 1e-6 and curve.max() <= capacity
    assert curve.sum() == pytest.approx(total, abs=1e-6 * max(total, 1))
    whole = rounded(curve, total)
    assert sum(whole) == total
    assert min(whole) >= 0 and max(whole) <= capacity
    free = [
        (weight, tokens - floor)
        for weight, tokens in zip(weights, curve, strict=True)
        if tokens < capacity * (1 - 1e-9) and weight > 1e-3
    ]
    for (weight, tokens), (other, others) in itertools.pairwise(free):
        assert tokens * other == pytest.approx(others * weight, rel=1e-6, abs=1e-3)


def test_a_floor_comes_before_shares() -> None:
    """Half of 10 tokens each, and the pool of 10 in the ratio 1 : 4; then cut at the capacity."""
    allocator = curve_of({"kind": "shares", "shares": [1, 4.0], "floor": 0.5})
    assert allocator.allocate(10, 2, 100).tolist() == [7, 13]
    assert allocator.allocate(10, 2, 12).tolist() == [8, 12]
    means, capacities = np.array([10, 10, 4, 5]), np.array([100, 12, 9, 5])
    every = allocator.allocate_all(means, 2, capacities)
    assert every.tolist() == [[7, 13], [8, 12], [3, 5], [5, 5]]
    assert curve_of({"kind": "shares", "shares": [1, 3.0]}).allocate(10, 2, 12).tolist() == [8, 12]
    assert share_out(np.zeros(4), 5, 9).tolist() == [5.0] * 4, "no weights: all alike"
    even = curve_of({"kind": "shares", "shares": [1, 4.0], "floor": 1.0})
    assert even.allocate(10, 2, 100).tolist() == [10, 10]
    with pytest.raises(ValueError, match="floor"):
        curve_of({"kind": "shares", "shares": [1, 4.0], "floor": 1.5})


def test_shares_are_of_one_model() -> None:
    allocator = curve_of({"kind": "shares", "shares": [1, 2, 3]})
    allocator.check_layers(3)
    with pytest.raises(ValueError, match="shares for 3 layers, but this model has 32: calibrate"):
        allocator.check_layers(32)
