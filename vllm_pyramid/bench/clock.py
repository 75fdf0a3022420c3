# SPDX-License-Identifier: Apache-2.0
"""A clock that runs for one part of a step at a time, switched by the functions that are called.

Parts are exclusive: while a timed function runs inside another, the time is its own and not the
other's. So the parts of a step add up to the step, with nothing counted twice or scaled. A switch
is two readings of the processor's clock and a few Python instructions, about a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["PartClock", "Replacements"]

_ABSENT = object()


class PartClock:
    """Nanoseconds of each part.

    For functions of one thread: what runs in others belongs to the part that waits for it.

    Args:
        parts: their names.

    Attributes:
        spent: nanoseconds by part; what runs outside of all timed functions is nobody's.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        self.spent = dict.fromkeys(parts, 0)
        self._running: list[str] = []
        self._since = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is `part`'s but for what timed functions that it calls take."""
        spent, running, now = self.spent, self._running, time.perf_counter_ns
        assert part in spent, part

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            if running:
                spent[running[-1]] += begin - self._since
            running.append(part)
            self._since = begin
            try:
                return function(*args, **kwargs)
            finally:
                end = now()
                spent[part] += end - self._since
                running.pop()
                self._since = end

        return call


class Replacements:
    """Attributes of objects that are replaced in a `with` statement, and then as they were.

    What an object has from its class comes from there again. The same replacements can be put in
    place any number of times.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[Any, str, Any]] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def plan(self, owner: Any, name: str, value: Any) -> None:
        """Have `owner.name` be `value` within the `with` statement."""
        assert hasattr(owner, name), f"{type(owner).__qualname__} has no {name}"
        self._planned.append((owner, name, value))

    def __enter__(self) -> None:
        assert not self._replaced, "the replacements are in place already"
        for owner, name, value in self._planned:
            self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
