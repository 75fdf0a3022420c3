# SPDX-License-Identifier: Apache-2.0
"""Say where a prompt begins to differ from the last turn of its session.

A turn leaves one number for each range of its tokens, and no token: at most `MAX_MARKS` of them, so
the ranges of a long prompt are longer. They are never finer than `FINEST` tokens: who knows a
session's name could otherwise guess its words one by one.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FINEST, MAX_MARKS = 32, 512
_MULTIPLIERS = np.frombuffer(secrets.token_bytes(8 * (1 << 12)), np.uint64) | np.uint64(1)

Marks = npt.NDArray[np.uint64]


class LastTurn(NamedTuple):
    """What a session knows of its latest prompt.

    Attributes:
        digest: of all of it. length: its tokens.
        size: tokens of a range. marks: one for each whole range.
        terms: what its cache depends on apart from the tokens.
    """

    digest: bytes
    length: int
    size: int
    marks: Marks
    terms: bytes

    @classmethod
    def of(cls, numbers: npt.NDArray[np.int64], digest: bytes, terms: bytes) -> LastTurn:
        """Make it of a prompt's numbers `[tokens]` (`Prompt.numbers`)."""
        size = FINEST
        while len(numbers) > size * MAX_MARKS:
            size *= 2
        return cls(digest, len(numbers), size, _marks(numbers, size), terms)

    def difference(self, numbers: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Return the range of tokens in which another prompt first differs from this one.

        The range is empty if the other prompt ends before it differs.
        """
        shorter = min(len(numbers), self.length)
        ours, theirs = self.marks, _marks(numbers[: self.length], self.size)
        count = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:count] != theirs[:count])
        first = int(differ[0]) if len(differ) else count
        start = min(first * self.size, shorter)
        if not len(differ) and len(numbers) < self.length:
            return len(numbers), len(numbers)
        return start, min(start + self.size, shorter)


def _marks(numbers: npt.NDArray[np.int64], size: int) -> Marks:
    """Return a number for each whole range of `size` tokens."""
    whole = len(numbers) // size
    ranges = numbers[: whole * size].astype(np.uint64).reshape(whole, size)
    times = np.resize(_MULTIPLIERS, size)
    marks: Marks = (ranges * times).sum(axis=1, dtype=np.uint64)
    return marks
