# SPDX-License-Identifier: Apache-2.0
"""From what tokens are worth to the lengths of layers: LU-KV's convex hull and greedy steps.

A layer's curve U(k) is the utility of its k best tokens in the order of the scorer, so U(k) -
U(k-1), its gains, may rise again: the scorer does not know what comes. On the least concave curve
above U the gains fall, and then taking one token a step, always the one that gains most, is optimal
(arXiv:2602.08585; the slopes of that curve are the isotonic regression of the gains). Where the
lengths end at corners of the curves, nothing else of the same total has more utility.

Shapes: L layers, C tokens of a prompt that may be kept or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_pyramid.methods.utility_profile import PERCENTS
from vllm_pyramid.policy.allocator import Integers, Reals


def falling(gains: Reals) -> Reals:
    """Return the gains of the least concave curve above the sums of `gains`: `[C]` to `[C]`.

    Neighbours that rise are pooled to their mean, until none does.
    """
    sums: list[float] = []
    counts: list[int] = []
    for gain in gains.tolist():
        total, count = gain, 1
        # A pool joins the one before it unless its mean is less.
        while sums and total * counts[-1] >= sums[-1] * count:
            total, count = total + sums.pop(), count + counts.pop()
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(sums) / np.array(counts), counts)


def relative(gains: Reals) -> Reals:
    """Return gains `[L, C]` as shares of each layer's sum; a layer without any has none."""
    totals = gains.sum(axis=1, keepdims=True)
    shares: Reals = gains / np.where(totals > 0, totals, 1.0)
    return shares


def best_lengths(gains: Reals, totals: Sequence[int]) -> Integers:
    """Return the lengths of layers for each total: `[totals, L]` int64 that sum to it.

    Args:
        gains: `[L, C]`, those of each layer's tokens in the order of its scorer, not negative.
        totals: tokens of all layers together, 0 .. L * C. Of equal gains the lower layer's come
            first.
    """
    layers, capacity = gains.shape
    concave = np.stack([falling(row) for row in gains])
    order = np.argsort(-concave.ravel(), kind="stable") // capacity
    taken = [np.bincount(order[:total], minlength=layers) for total in totals]
    return np.array(taken, np.int64).reshape(len(taken), layers)


def rows_of(gains: Reals) -> Reals:
    """Return a prompt's rows for budgets of 1 to 99 %: `[99, L]`, shares of the C tokens."""
    layers, capacity = gains.shape
    totals = [round(percent * layers * capacity / 100) for percent in range(1, PERCENTS + 1)]
    return best_lengths(gains, totals) / capacity


def retained(gains: Reals, lengths: npt.ArrayLike) -> float:
    """Return the share of all layers' utility that layers of these lengths keep, 0 to 1.

    Args:
        gains: `[L, C]`. lengths: `[L]` whole numbers.
    """
    kept = np.arange(gains.shape[1]) < np.asarray(lengths)[:, None]
    return float(gains[kept].sum() / max(float(gains.sum()), 1e-300))
