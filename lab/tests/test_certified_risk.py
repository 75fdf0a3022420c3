# SPDX-License-Identifier: Apache-2.0
"""Certified budgets on made-up losses: how often a budget is certified that should not be."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from lab.certified.risk import (
    MOST_PROMPTS,
    certified,
    least_prompts,
    p_value,
    prompts_that_would_do,
)

pytestmark = pytest.mark.cpu

RISK, CONFIDENCE, SPLITS = 0.02, 0.9, 200
# With the confidence, more false statements among `SPLITS` come up once in a thousand runs.
ALLOWED = 34


def population(source: np.random.Generator, means: list[float], many: int = 20_000) -> npt.NDArray:
    """Losses as they were seen on real models: few prompts carry nearly all of it."""
    hit = source.random(many)
    size = source.beta(2, 3, many)  # of a prompt that is hit, 0.4 on average
    return np.stack([np.where(hit < mean / 0.4, size, 0.0) for mean in means])


def test_allowed_is_the_binomials_tail() -> None:
    p = 1 - CONFIDENCE
    tail = sum(
        math.comb(SPLITS, k) * p**k * (1 - p) ** (SPLITS - k) for k in range(ALLOWED + 1, SPLITS)
    )
    assert tail < 1e-3


def test_coverage_on_random_splits() -> None:
    """The statement holds in 9 of 10 samples, and budgets are found."""
    source = np.random.default_rng(7)
    losses = population(source, [0.001, 0.003, 0.008, 0.013, 0.021, 0.03, 0.1])
    truth = losses.mean(axis=1)
    assert truth[3] < RISK < truth[4]
    wrong, found = 0, []
    for _ in range(SPLITS):
        sample = source.choice(losses.shape[1], 400, replace=False)
        count = certified(losses[:, sample], RISK, CONFIDENCE)
        found.append(count)
        others = np.delete(losses[max(count - 1, 0)], sample)
        wrong += count > 0 and others.mean() > RISK
    assert wrong <= ALLOWED
    assert np.mean(np.array(found) >= 2) > 0.9 and np.mean(np.array(found) >= 3) > 0.5


@pytest.mark.parametrize("shape", ["few large", "equal", "halves", "all or nothing"])
def test_coverage_where_every_budget_is_just_too_small(shape: str) -> None:
    """The hardest case: the mean loss is the risk itself, so no certificate is right."""
    source = np.random.default_rng(11)
    made = {
        "few large": lambda: population(source, [RISK], 500)[0],
        "equal": lambda: np.full(500, RISK),
        "halves": lambda: 2 * RISK * (source.random(500) < 0.5),
        "all or nothing": lambda: (source.random(500) < RISK).astype(float),
    }[shape]
    wrong = sum(p_value(made(), RISK, CONFIDENCE) <= 1 - CONFIDENCE for _ in range(SPLITS))
    assert wrong <= ALLOWED


def test_losses_need_not_fall_with_the_budget() -> None:
    """A larger budget that fails ends the search, whatever a smaller one does."""
    source = np.random.default_rng(3)
    good, bad = population(source, [0.001], 600)[0], population(source, [0.2], 600)[0]
    assert certified(np.stack([good, good, good]), RISK, CONFIDENCE) == 3
    assert certified(np.stack([good, bad, good]), RISK, CONFIDENCE) == 1
    assert certified(np.stack([bad, good, good]), RISK, CONFIDENCE) == 0


@pytest.mark.parametrize(("risk", "confidence"), [(0.02, 0.9), (0.05, 0.9), (0.1, 0.99)])
def test_the_fewest_prompts(risk: float, confidence: float) -> None:
    least = least_prompts(risk, confidence)
    assert p_value(np.zeros(least), risk, confidence) <= 1 - confidence
    assert p_value(np.zeros(int(0.97 * least) - 1), risk, confidence) > 1 - confidence
    # No test of losses within [0, 1] does with fewer.
    assert least >= math.log(1 - confidence) / math.log(1 - risk)
    assert p_value(np.zeros(0), risk, confidence) == 1.0


def test_how_many_prompts_would_do() -> None:
    source = np.random.default_rng(5)
    many = population(source, [0.01], 100_000)[0]
    would_do = prompts_that_would_do(many[:120], RISK, CONFIDENCE)
    assert would_do is not None and would_do > 120
    passes = [
        p_value(source.choice(many, 3 * would_do), RISK, CONFIDENCE) <= 1 - CONFIDENCE
        for _ in range(50)
    ]
    assert np.mean(passes) > 0.7
    assert prompts_that_would_do(np.full(50, RISK), RISK, CONFIDENCE) is None
    assert prompts_that_would_do(np.full(50, 0.5), RISK, CONFIDENCE) is None
    assert (
        prompts_that_would_do(np.full(50, RISK - 1e-7), RISK, CONFIDENCE) or MOST_PROMPTS
    ) > 10**4
