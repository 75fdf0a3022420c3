# SPDX-License-Identifier: Apache-2.0
"""The record of which tokens are scored, and how. Shape legend as in `kernels/records.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreShape:
    """Which tokens of a request are scored, and how the two scores become one.

    Attributes:
        sinks: first tokens of a request that stay. They are pooled, and nothing else of them
            counts.
        window: last tokens that stay, at least as many as there are queries. They count in the
            softmax alone.
        kernel_size: width of the pooling in tokens, odd.
        expected: weight of the second score; 0 leaves it out.

    Raises:
        ValueError: the width is not a positive odd number, or another number is negative.
    """

    sinks: int
    window: int
    kernel_size: int = 21
    expected: float = 0.25

    def __post_init__(self) -> None:
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {self.kernel_size} must be positive and odd")
        if min(self.sinks, self.window, self.expected) < 0:
            raise ValueError(
                f"sinks {self.sinks}, window {self.window} and expected {self.expected} must not "
                "be negative"
            )
