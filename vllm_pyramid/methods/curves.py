# SPDX-License-Identifier: Apache-2.0
"""Allocators that know the lengths beforehand: equal, fixed shares, or a curve over depth.

Notation as in `allocator.py`. If the bottom layer's k_0 would exceed C it is set to C, and the
surplus goes to the layers above without changing the kind of the curve (PyramidKV's rule for its
arithmetic sequence, applied to all of them).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from vllm_pyramid.policy.allocator import CurveAllocator, Integers, Reals


class UniformAllocator(CurveAllocator):
    """Give every layer the same: k_l = B (SnapKV, StreamingLLM)."""

    kind: Literal["uniform"] = "uniform"

    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        return np.full(num_layers, float(mean))

    def curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        return np.repeat(means[:, None].astype(np.float64), num_layers, axis=1)


class SharesAllocator(CurveAllocator):
    """Give layers fixed shares, as `vllm-pyramid calibrate` measures: k_l = B * m * s_l / sum(s).

    A layer whose share comes to more than C keeps C; the others share what is left.

    Attributes:
        shares: a number a layer, from the input side; at least 0, not all 0.
        floor: the part of B that each layer keeps whatever its number; the rest is shared.
    """

    kind: Literal["shares"] = "shares"
    shares: tuple[float, ...] = Field(min_length=1)
    floor: float = Field(default=0.0, ge=0.0, le=1.0)

    @field_validator("shares", mode="before")
    @classmethod
    def _from_list(cls, value: object) -> object:
        """Turn a list, as YAML and JSON have it, into a tuple of floats."""
        if isinstance(value, list | tuple):
            return tuple(float(share) if type(share) in (int, float) else share for share in value)
        return value

    @field_validator("shares")
    @classmethod
    def _usable(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= share < np.inf for share in value) or not any(value):
            raise ValueError(f"shares must be at least 0, finite, and not all 0, not {list(value)}")
        return value

    def check_layers(self, num_layers: int) -> None:
        if len(self.shares) != num_layers:
            raise ValueError(
                f"the allocator has shares for {len(self.shares)} layers, but this model has "
                f"{num_layers}: calibrate for this model (vllm-pyramid calibrate)"
            )

    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        return share_out(np.array(self.shares), mean, capacity, self.floor * mean)

    def curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        if self.floor:  # each prompt has a floor of its own
            return CurveAllocator.curves(self, means, num_layers, capacities)
        return share_out_all(np.array(self.shares), means, capacities)


def share_out(weights: Reals, mean: int, capacity: int, floor: float = 0.0) -> Reals:
    """Divide B tokens a layer in proportion to weights: `[m]` reals in [0, C] summing to B * m.

    Args:
        weights: `[m]`, finite and not negative; all 0 means all alike.
        mean: B. capacity: C >= B. Layers whose share is above C keep C, and the others share what
            is left, in proportion.
        floor: tokens that each layer keeps whatever its weight, at most B; the rest is shared.
    """
    return share_out_all(weights, np.array([mean]), np.array([capacity]), floor)[0]


def share_out_all(
    weights: Reals, means: Integers, capacities: Integers, floor: float = 0.0
) -> Reals:
    """Return `share_out` for several means and capacities, `[T]` each: `[T, m]`."""
    assert floor >= 0 and (floor <= means).all() and (means <= capacities).all()
    count = len(weights)
    curves = np.full((len(means), count), float(floor))
    # Each row's part of the sum that is not divided yet, and its layers that are not full.
    rest = means * count - curves.sum(axis=1)
    is_open = np.ones(curves.shape, bool)
    rows = np.flatnonzero(rest > 0)
    while rows.size:
        open_layers, limits = is_open[rows], capacities[rows, None]
        share = np.where(open_layers, weights, 0.0)
        largest = share.max(axis=1, keepdims=True)
        # Divided by the largest first: products with the tiniest numbers would be rounded. Without
        # one, no layer has a weight or those that do are full.
        share = np.where(largest > 0, share / np.where(largest > 0, largest, 1.0), open_layers)
        wanted = floor + rest[rows, None] * share / share.sum(axis=1, keepdims=True)
        wanted = np.where(open_layers, wanted, curves[rows])
        full = open_layers & (wanted >= limits)
        curves[rows] = np.where(full, limits, curves[rows])
        ended = ~full.any(axis=1)
        curves[rows[ended]] = np.minimum(wanted[ended], limits[ended])
        rest[rows] -= full.sum(axis=1) * (capacities[rows] - floor)
        is_open[rows] &= ~full
        rows = rows[~ended & (rest[rows] > 0) & is_open[rows].any(axis=1)]
    return curves


class DecayingAllocator(CurveAllocator):
    """Base of the curves that fall with depth from k_0 to k_{m-1} = B / beta.

    Attributes:
        beta: how much less than the mean the top layer keeps, >= 1; 1 is the uniform allocation.
            PyramidKV's default is 20; 14 to 20 are all close (its Table 6).
    """

    beta: float = Field(default=20.0, ge=1.0, allow_inf_nan=False)


class _InterpolatingAllocator(DecayingAllocator):
    """Curves k_l = k_{m-1} + (k_0 - k_{m-1}) * s_l, s falling from 1 to 0.

    k_0 follows from the sum: with g the mean of s, B = k_{m-1} + (k_0 - k_{m-1}) * g.
    """

    @abstractmethod
    def shape(self, depth: Reals) -> Reals:
        """Return s at relative depths 0 .. 1: `[m]` to `[m]`."""

    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        curve: Reals = self.curves(np.array([mean]), num_layers, np.array([capacity]))[0]
        return curve

    def curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        shape = self.shape(np.linspace(0.0, 1.0, num_layers))
        gain = float(shape.mean())
        top = means / self.beta
        bottom = top + (means - top) / gain
        is_full = bottom > capacities
        bottom = np.where(is_full, capacities, bottom)
        top = np.where(is_full, (means - bottom * gain) / (1.0 - gain), top)
        curves: Reals = top[:, None] + (bottom - top)[:, None] * shape
        return curves


class ArithmeticAllocator(_InterpolatingAllocator):
    """PyramidKV: let the lengths fall with depth in equal steps (arXiv:2406.02069, 4.2.1, Eq. 1).

    k_{m-1} = B / beta, k_0 = 2B - k_{m-1}, equal steps between. If k_0 > C: k_0 = C and
    k_{m-1} = 2B - C.
    """

    kind: Literal["arithmetic"] = "arithmetic"

    def shape(self, depth: Reals) -> Reals:
        return 1.0 - depth


class ExponentialAllocator(_InterpolatingAllocator):
    """Let the lengths decay from k_0 to k_{m-1} = B / beta, with rate ln(beta) over the depth.

    k_l = k_{m-1} + (k_0 - k_{m-1}) * (beta^-x - beta^-1) / (1 - beta^-1) with x = l / (m-1).
    PyramidKV's Table 4 compares such a strategy by name without giving its formula.
    """

    kind: Literal["exponential"] = "exponential"

    def shape(self, depth: Reals) -> Reals:
        if self.beta - 1.0 < 1e-9:
            return 1.0 - depth  # the limit for beta towards 1
        shape: Reals = np.expm1((1.0 - depth) * np.log(self.beta)) / (self.beta - 1.0)
        return shape


class GeometricAllocator(DecayingAllocator):
    """Let the lengths fall as a geometric sequence: k_{m-1} = B / beta, k_l = k_{m-1} q^(m-1-l).

    q >= 1 solves (1 + q + ... + q^(m-1)) = beta * m. If k_0 > C: k_0 = C, and q solves
    C * (1 + q^-1 + ... + q^-(m-1)) = B * m. PyramidKV's Table 4 compares such a strategy by name
    without giving its formula.
    """

    kind: Literal["geometric"] = "geometric"

    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        curve: Reals = self.curves(np.array([mean]), num_layers, np.array([capacity]))[0]
        return curve

    def curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        powers = np.arange(num_layers - 1, -1, -1, dtype=np.float64)
        # Relative to the top layer the sequence is 1, q, q^2, ...: its mean is beta.
        log_ratios = np.full(len(means), _solve_log_ratio(num_layers, self.beta))
        tops = means / self.beta
        full = np.flatnonzero(tops * np.exp(log_ratios * (num_layers - 1)) > capacities)
        if full.size:
            # Relative to the bottom layer it is 1, 1/q, 1/q^2, ...: its mean is B / C.
            log_ratios[full] = -_solve_log_ratios(num_layers, means[full] / capacities[full])
            tops[full] = capacities[full] * np.exp(-log_ratios[full] * (num_layers - 1))
        values = tops[:, None] * np.exp(log_ratios[:, None] * powers)
        # The ratio is solved to float precision; the sum must hold to far less than one token.
        values *= (means * num_layers / values.sum(axis=1))[:, None]
        curves: Reals = np.minimum(values, capacities[:, None].astype(np.float64))
        return curves


@lru_cache(maxsize=4096)
def _solve_log_ratio(num_terms: int, mean: float) -> float:
    """Return `_solve_log_ratios` of one mean."""
    return float(_solve_log_ratios(num_terms, np.array([mean]))[0])


def _solve_log_ratios(num_terms: int, means: Reals) -> Reals:
    """Return x = log r such that the mean of 1, r, ..., r^(num_terms-1) is each of `means`.

    The mean is expm1(m x) / (m expm1(x)) for m terms. Its logarithm rises with x and is convex, so
    Newton's steps from above come down to the solution and never pass it.
    """
    wanted, slope_at_0 = np.log(means), (num_terms - 1) / 2
    # Upwards the last term alone is at most the sum, mean * num_terms.
    x = np.where(means > 1.0, np.log(np.maximum(means, 1.0) * num_terms) / (num_terms - 1), 0.0)
    for _ in range(100):
        x = np.where(x == 0.0, 1e-200, x)
        sums, terms = np.expm1(num_terms * x), np.expm1(x)
        # The slope is a difference of two numbers that are large and alike near 0.
        slope = num_terms * (1.0 + 1.0 / sums) - (1.0 + 1.0 / terms)
        slope = np.where(np.abs(x) < 1e-6, slope_at_0, slope)
        step = (np.log(sums / (num_terms * terms)) - wanted) / slope
        x = np.maximum(x - step, -60.0)
        if (np.abs(step) <= 1e-15 + 1e-14 * np.abs(x)).all():
            break
    return x
