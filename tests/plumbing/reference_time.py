# SPDX-License-Identifier: Apache-2.0
"""Process time as a reference machine would take it, so that bounds hold on any machine.

A slow or busy machine takes longer for everything: what is measured is divided by what fixed work
takes in the same moment. Process time alone is not enough, since cores share caches and clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np

# Of `_fixed_work`, on an idle core of an AMD EPYC with Python 3.11.
REFERENCE_MS = 0.5


class ReferenceTime:
    """Times of steps; the least of several counts, since other work only adds to them."""

    def __init__(self) -> None:
        self._fixed: list[float] = []

    def ms(self, step: Callable[..., object], *args: Any) -> float:
        """Return the step's process time on this machine, and measure fixed work, too."""
        self._fixed.append(_ms(_fixed_work))
        taken = _ms(step, *args)
        self._fixed.append(_ms(_fixed_work))
        return taken

    def on_reference(self, ms: float) -> float:
        """Return what the reference machine would take for `ms` of this machine."""
        return ms * REFERENCE_MS / min(self._fixed)


def _ms(step: Callable[..., object], *args: Any) -> float:
    start = time.process_time_ns()
    step(*args)
    return (time.process_time_ns() - start) / 1e6


def _fixed_work() -> None:
    """Do what planning consists of: calls, objects, hashes, and operations on small arrays."""
    parts = {}
    for number in range(500):
        parts[number, str(number)] = sha256(b"%d" % number).digest()
    values = np.arange(8000.0).reshape(100, 80)
    for _ in range(8):
        values = np.sort(np.maximum(np.floor(values * 0.99), 1.0), axis=1)
    assert len(parts) == 500 and values[-1, -1] > 1.0
