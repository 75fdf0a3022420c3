# SPDX-License-Identifier: Apache-2.0
"""The arrival times that `lab.bursts` makes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lab.bursts.__main__ import CAPACITY, RATES, arrivals

pytestmark = pytest.mark.cpu


def test_arrivals_follow_their_seed_and_rates() -> None:
    """The mean is the load's; the rate of each piece is as RATES says."""
    found = arrivals(40_000, 3.0, seed=1)
    assert found == arrivals(40_000, 3.0, seed=1) != arrivals(40_000, 3.0, seed=2)
    assert len(found) / found[-1] == pytest.approx(3.0, rel=0.03)
    gaps = [after - before for before, after in pairwise([0.0, *found])]
    of_factor: dict[float, list[float]] = {}
    for index, gap in enumerate(gaps):
        of_factor.setdefault(RATES[index // CAPACITY % len(RATES)], []).append(gap)
    means = {factor: sum(own) / len(own) * factor for factor, own in of_factor.items()}
    assert max(means.values()) < 1.05 * min(means.values())
