# SPDX-License-Identifier: Apache-2.0
"""Which budgets keep the mean loss below a risk: tests that hold for any number of prompts.

A loss is a number from 0 to 1: of a prompt, the share of the tokens in which a budget disagrees
with the whole cache. The prompts are a sample; what is asked for is the mean over all prompts like
them. Budgets are tested from the largest down, and the first that fails ends the search (fixed
sequence testing: Learn then Test, arXiv:2110.01052, section 2.3). So with probability `confidence`
no budget with a larger mean loss than `risk` is certified, however the losses depend on the budget.

One budget is tested by betting against "the mean loss is at least `risk`" (arXiv:2010.09686; as a
bound of risk-controlling prediction sets arXiv:2101.02703, section 3.1.3): a bet wins where losses
are smaller than the risk, and the capital of a bettor who cannot cheat exceeds 1 / (1 - confidence)
with probability 1 - confidence at most (Ville's inequality). Nothing is assumed of the losses but
that they are exchangeable and within [0, 1].

Conformal risk control (arXiv:2208.02814) gives the mean over all samples of prompts alone, and
needs losses that never fall with a smaller budget; here the statement is about the sample at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

Losses = npt.NDArray[np.float64]
# Prompts up to which the number that would do is looked for.
MOST_PROMPTS = 1_000_000
_RESAMPLES = 25


def p_value(losses: Losses, risk: float, confidence: float) -> float:
    """Return the p-value of "the mean loss is at least `risk`".

    Args:
        losses: `[n]` within [0, 1], in an order that does not depend on them.
        confidence: of the test; the bets are sized for it.
    """
    count = len(losses)
    if not count:
        return 1.0
    numbers = np.arange(1, count + 1)
    means = (0.5 + losses.cumsum()) / (1 + numbers)
    variances = (0.25 + ((losses - means) ** 2).cumsum()) / (1 + numbers)
    # A bet knows the losses before its own alone.
    before = np.concatenate([[0.25], variances[:-1]])
    bets = np.minimum(1.0, np.sqrt(2 * np.log(1 / (1 - confidence)) / (count * before)))
    capital = np.log1p(-bets * (losses - risk)).cumsum()
    return float(np.exp(-max(capital.max(), 0.0)))


def certified(losses: Losses, risk: float, confidence: float) -> int:
    """Return how many budgets are certified, from the largest down.

    Args:
        losses: `[budgets, n]`, the largest budget first; every row has the prompts in one order.
    """
    for number, of_budget in enumerate(losses):
        if p_value(of_budget, risk, confidence) > 1 - confidence:
            return number
    return len(losses)


@lru_cache(maxsize=64)
def least_prompts(risk: float, confidence: float) -> int:
    """Return the fewest prompts with which any budget can be certified: without a single loss."""
    return _smallest(np.zeros, risk, confidence) or MOST_PROMPTS


def prompts_that_would_do(losses: Losses, risk: float, confidence: float) -> int | None:
    """Estimate how many prompts would certify a budget, if the others are like these.

    Args:
        losses: `[n]` of the budget.

    Returns:
        The number at which half of the samples drawn from these losses pass; None if there is none
        up to `MOST_PROMPTS`, because the mean loss is not below the risk, or hardly.
    """
    if losses.mean() >= risk:
        return None
    source = np.random.default_rng(0)
    found = []
    for _ in range(_RESAMPLES):
        drawn = source.choice(losses, min(MOST_PROMPTS, 64 * max(len(losses), 256)))
        found.append(
            _smallest(partial(_first, drawn), risk, confidence, len(drawn)) or MOST_PROMPTS + 1
        )
    middle = sorted(found)[_RESAMPLES // 2]
    return middle if middle <= MOST_PROMPTS else None


def _first(losses: Losses, count: int) -> Losses:
    return losses[:count]


def _smallest(
    draw: Callable[[int], Losses], risk: float, confidence: float, most: int = MOST_PROMPTS
) -> int | None:
    """Return the smallest number of losses that pass, to a hundredth; None up to `most`."""
    low, high = 0, 1
    while p_value(draw(high), risk, confidence) > 1 - confidence:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        passes = p_value(draw(middle), risk, confidence) <= 1 - confidence
        low, high = (low, middle) if passes else (middle, high)
    return high
