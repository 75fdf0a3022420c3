# SPDX-License-Identifier: Apache-2.0
"""What the tests of engines compare with, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.support import Job, Outcome, assert_same_tokens

pytestmark = pytest.mark.cpu


def _outcome(*positions: dict[int, float], chosen: list[int] | None = None) -> Outcome:
    """Of a request whose tokens are the likeliest, or `chosen`; log probabilities by token."""
    tokens = chosen or [max(position, key=position.__getitem__) for position in positions]
    logprobs: list[Any] = [
        {token: SimpleNamespace(logprob=value) for token, value in position.items()}
        for position in positions
    ]
    answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
    return Outcome(Job([1], None), "request", SimpleNamespace(outputs=[answer]))


FIRST = {7: -1.0, 8: -2.0}
ONE = _outcome(FIRST, {3: -1.0, 4: -1.00001}, {5: -0.5, 6: -3.0})


def test_equal_up_to_a_near_tie() -> None:
    assert_same_tokens([ONE, ONE], [ONE, ONE])
    other = _outcome(FIRST, {3: -1.00001, 4: -1.0}, {1: -0.5, 2: -3.0})
    assert other.token_ids == [7, 4, 1]
    assert_same_tokens([ONE], [other])


@pytest.mark.parametrize(
    "other",
    [
        _outcome(FIRST, {3: -1.2, 4: -1.0}, {5: -0.5, 6: -3.0}),  # another token is likelier
        _outcome(FIRST, {9: -1.0, 4: -1.1}, {5: -0.5, 6: -3.0}),  # the one that ONE did not see
        _outcome(FIRST, {3: -1.0, 4: -1.1}, {5: -0.5, 6: -3.0}, chosen=[7, 4, 5]),
        _outcome({7: -1.1, 8: -2.0}, {3: -1.00001, 4: -1.0}, {5: -0.5, 6: -3.0}),  # before the tie
        _outcome(FIRST, {3: -1.0, 4: -1.00001}),  # shorter
    ],
)
def test_real_differences(other: Outcome) -> None:
    for pair in ((ONE, other), (other, ONE)):
        with pytest.raises(AssertionError):
            assert_same_tokens(*([run] for run in pair))
