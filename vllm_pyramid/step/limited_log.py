# SPDX-License-Identifier: Apache-2.0
"""A log that many failures of one kind cannot fill."""

from __future__ import annotations

import time
from collections.abc import Callable


class LimitedLog:
    """Calls `log` for the first message of a kind, and then at most every `seconds`."""

    def __init__(self, log: Callable[..., None], seconds: float = 10.0) -> None:
        self._log, self._seconds = log, seconds
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def __call__(self, kind: str, message: str, *args: object) -> None:
        """Log `message % args`, or count it as left out; there are few kinds."""
        now = time.monotonic()
        if now < self._next.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next[kind] = now + self._seconds
        if left_out := self._left_out.pop(kind, 0):
            message += f" (and {left_out} more since the last such line)"
        self._log(message, *args)
