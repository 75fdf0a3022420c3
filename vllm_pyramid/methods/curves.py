# SPDX-License-Identifier: Apache-2.0
"""Allocators that know the lengths beforehand: equal, fixed shares, or falling with depth.

Notation as in `allocator.py`.

The formulas distribute what is kept beyond window and sinks, x = l / (m - 1):

    uniform       k(l) = B
    arithmetic    k(l) = k(0) - (k(0) - k(m-1)) x,   k(m-1) = B / beta,   k(0) = 2 B - k(m-1)
    shares        k(l) = f B + (1 - f) B m w(l) / sum(w),   f: `floor`, w: the shares

Real numbers are rounded by largest remainder, ties to the lower layer, so the sum is exact. At beta
20 and 32 layers the bottom layer keeps 1.95 B. With one layer every allocator keeps B.
"""

from __future__ import annotations

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

    Layers whose share is above C keep C, and the others share what is left, in proportion.

    Args:
        weights: `[m]`, finite and not negative; all 0 means equal shares.
        mean: B. capacity: C >= B.
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


class ArithmeticAllocator(CurveAllocator):
    """PyramidKV: let the lengths fall with depth in equal steps (arXiv:2406.02069, 4.2.1, Eq. 1).

    k_{m-1} = B / beta, k_0 = 2B - k_{m-1}, equal steps between. If k_0 > C: k_0 = C and
    k_{m-1} = 2B - C.

    Attributes:
        beta: how much less than the mean the top layer keeps, >= 1; 1 is the uniform allocation.
            PyramidKV's default is 20; 14 to 20 are all close (its Table 6).
    """

    kind: Literal["arithmetic"] = "arithmetic"
    beta: float = Field(default=20.0, ge=1.0, allow_inf_nan=False)

    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        curve: Reals = self.curves(np.array([mean]), num_layers, np.array([capacity]))[0]
        return curve

    def curves(self, means: Integers, num_layers: int, capacities: Integers) -> Reals:
        shape = 1.0 - np.linspace(0.0, 1.0, num_layers)
        # k_l = k_{m-1} + (k_0 - k_{m-1}) * shape, so B = k_{m-1} + (k_0 - k_{m-1}) * gain.
        gain = float(shape.mean())
        top = means / self.beta
        bottom = top + (means - top) / gain
        is_full = bottom > capacities
        bottom = np.where(is_full, capacities, bottom)
        top = np.where(is_full, (means - bottom * gain) / (1.0 - gain), top)
        curves: Reals = top[:, None] + (bottom - top)[:, None] * shape
        return curves
