# SPDX-License-Identifier: Apache-2.0
"""Budgets: what is read, what is refused, and how a share becomes tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pyramid.plan import Budget


@pytest.mark.parametrize(
    ("given_value", "value"),
    [
        (512, 512),
        ("512", 512),
        (" 64 ", 64),
        (1, 1),
        ("12%", "12%"),
        ("12 %", "12%"),
        ("12.50%", "12.5%"),
        ("0.05%", "0.05%"),
        ("100%", "100%"),
    ],
)
def test_read_and_written_back(given_value: object, value: object) -> None:
    budget = Budget.parse(given_value)
    assert budget.value == value
    assert str(budget) == str(value)
    assert Budget.parse(budget.value) == budget
    assert hash(Budget.parse(budget.value)) == hash(budget)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (0, "out of range"),
        ("-5", "out of range"),
        (2**31, "out of range"),
        ("0%", "above 0%"),
        ("120%", "at most 100%"),
        ("100.01%", "at most 100%"),
        ("1k", "cannot be read"),
        ("12%%", "cannot be read"),
        ("٣", "cannot be read"),
        ("9" * 9999, "cannot be read"),
        (True, "is a bool"),
        (None, "is a NoneType"),
    ],
)
def test_refused_with_the_reason(wrong: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Budget.parse(wrong)


@pytest.mark.parametrize(
    ("text", "prompt_len", "floor", "tokens"),
    [
        (512, 8192, 9, 512),
        (512, 100, 9, 100),
        ("12%", 100, 9, 12),
        ("12%", 101, 9, 13),  # rounded up
        ("7%", 100, 1, 7),  # 0.07 * 100 is 7.000000000000001 in floats
        ("12%", 50, 9, 9),  # raised to the floor
        ("12%", 5, 9, 5),  # but not above the prompt
        ("100%", 4096, 9, 4096),
        ("12%", 0, 9, 0),
    ],
)
def test_tokens_for(text: object, prompt_len: int, floor: int, tokens: int) -> None:
    assert Budget.parse(text).tokens_for(prompt_len, floor) == tokens


@given(st.integers(1, 10_000), st.integers(0, 1_000_000), st.integers(1, 100))
def test_share_is_the_smallest_number_that_reaches_it(hundredths, prompt_len, floor) -> None:
    tokens = Budget.parse(f"{hundredths // 100}.{hundredths % 100:02d}%").tokens_for(
        prompt_len, floor
    )
    assert tokens <= prompt_len
    assert tokens * 10_000 >= hundredths * prompt_len
    if tokens > min(floor, prompt_len):
        assert (tokens - 1) * 10_000 < hundredths * prompt_len
