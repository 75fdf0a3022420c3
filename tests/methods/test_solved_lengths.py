# SPDX-License-Identifier: Apache-2.0
"""Lengths solved from scores, against every possible answer on small inputs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.methods.solved.worker import best_lengths, least_lengths, sum_of_heads

CLOSE = 1e-9


@st.composite
def score_tables(draw: st.DrawFn, max_layers: int = 3, max_tokens: int = 5) -> torch.Tensor:
    """Draw scores `[L, n]`, with equal ones, zeros and whole layers of zeros among them."""
    layers, tokens = draw(st.integers(1, max_layers)), draw(st.integers(1, max_tokens))
    score = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0.0, 8.0, width=32))
    row = st.lists(score, min_size=tokens, max_size=tokens)
    table = draw(st.lists(row, min_size=layers, max_size=layers))
    return torch.tensor(table, dtype=torch.float32)


def paper_retention(scores: torch.Tensor, lengths: tuple[int, ...], sinks: int) -> float:
    """Compute the mean R of Eq. 4 with Python's floats; sinks are kept and count."""
    total = 0.0
    for row, length in zip(scores.tolist(), lengths, strict=True):
        if not sum(row):
            total += 1.0
            continue
        best = sorted(row[sinks:], reverse=True)[:length]
        total += (sum(row[:sinks]) + sum(best)) / sum(row)
    return total / len(lengths)


def all_lengths(layers: int, capacity: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(capacity + 1), repeat=layers))


@settings(max_examples=300)
@given(score_tables(), st.data())
def test_no_lengths_of_the_same_total_retain_more(scores, data) -> None:
    """Compare Eq. 17 with all possible lengths."""
    layers, tokens = scores.shape
    sinks = data.draw(st.integers(0, min(2, tokens)))
    total = data.draw(st.integers(0, layers * (tokens - sinks)))
    lengths = tuple(best_lengths(scores, total, sinks=sinks).tolist())
    assert sum(lengths) == total and min(lengths) >= 0 and max(lengths) <= tokens - sinks
    best = max(
        paper_retention(scores, other, sinks)
        for other in all_lengths(layers, tokens - sinks)
        if sum(other) == total
    )
    assert paper_retention(scores, lengths, sinks) == pytest.approx(best, abs=CLOSE)


@settings(max_examples=300)
@given(score_tables(), st.data())
def test_no_smaller_total_reaches_the_goal(scores: torch.Tensor, data: st.DataObject) -> None:
    """Compare Eq. 18 with all possible lengths."""
    layers, tokens = scores.shape
    sinks = data.draw(st.integers(0, min(2, tokens)))
    goal = data.draw(st.one_of(st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.floats(0.01, 1.0)))
    most = layers * (tokens - sinks)
    limit = data.draw(st.one_of(st.just(most), st.integers(0, most)))
    lengths = tuple(least_lengths(scores, goal, limit=limit, sinks=sinks).tolist())
    assert sum(lengths) <= limit
    possible = all_lengths(layers, tokens - sinks)
    reaching = [
        sum(other)
        for other in possible
        if paper_retention(scores, other, sinks) >= goal - 2 * CLOSE
    ]
    surely = [sum(other) for other in possible if paper_retention(scores, other, sinks) >= goal]
    # Rounding may decide where a sum meets the goal to the last bit; nowhere else.
    assert min(limit, min(reaching)) <= sum(lengths) <= min(limit, *(surely or [most]))
    assert lengths == tuple(best_lengths(scores, sum(lengths), sinks=sinks).tolist())


def test_equal_scores_go_to_the_lower_layer() -> None:
    scores = torch.ones(3, 4)
    assert best_lengths(scores, 6).tolist() == [4, 2, 0]
    assert least_lengths(scores, 0.5, limit=12).tolist() == [4, 2, 0]
    assert best_lengths(scores, 0).tolist() == [0, 0, 0]
    assert best_lengths(scores, 12).tolist() == [4, 4, 4]


def test_heads_are_added_in_one_order_whatever_the_batch() -> None:
    values = torch.rand(3, 7, 1000, generator=torch.Generator().manual_seed(2)) ** 9
    together = sum_of_heads(values)
    assert torch.allclose(together, values.sum(dim=1))
    for width in (1, 3, 501, 999):
        assert torch.equal(sum_of_heads(values[1:2, :, :width])[0], together[1, :width])


def test_scores_that_are_no_numbers_count_as_nothing() -> None:
    """Solve for a request whose keys overflowed, which must not end the engine for the others."""
    scores = torch.full((3, 8), math.nan)
    scores[1] = torch.arange(8.0)
    lengths = best_lengths(scores, 10)
    assert int(lengths.sum()) == 10
    assert int(lengths[1]) >= 7
