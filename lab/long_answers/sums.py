# SPDX-License-Identifier: Apache-2.0
"""Sums in many steps: short prompts whose answers look back at their own last lines."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from lab.long_answers.table import json_objects


@dataclass(frozen=True)
class Sums:
    """The numbers `start`, `start + step`, ... in `rows` lines."""

    start: int
    step: int
    rows: int

    @classmethod
    def drawn(cls, rows: int, seed: int) -> Sums:
        """Draw numbers, equal for equal seeds."""
        draw = random.Random(seed)
        return cls(draw.randrange(100, 1000), draw.randrange(3, 10), rows)

    @property
    def lines(self) -> list[str]:
        """Return the right answer's lines."""
        return [
            json.dumps({"line": 1 + index, "value": self.start + index * self.step})
            for index in range(self.rows)
        ]

    @property
    def question(self) -> str:
        """Return the question to the model, with the answer's first lines."""
        first = "\n".join(self.lines[:3])
        return (
            f"Start with {self.start} and add {self.step} again and again. Write one JSON object "
            f"per line, {self.rows} lines in all, and nothing else. "
            f"The first three lines are:\n\n{first}\n"
        )

    def score(self, answer: str) -> tuple[float, int]:
        """Return the share of lines that are right, and how many come before a wrong one.

        A line is right if it adds `step` to the line before, be that right or wrong. Of several
        lines with one number the first right one counts.
        """
        expected = [json.loads(line) for line in self.lines]
        said = json_objects(answer)[: self.rows]
        right: set[int] = set()
        for before, line in zip([None, *said], said, strict=False):
            try:
                follows = {"line": before["line"] + 1, "value": before["value"] + self.step}
            except (TypeError, KeyError):
                follows = expected[0]
            if line == follows:
                right.add(line["line"])
        pairs = enumerate(zip(said, expected, strict=False))
        first = next((index for index, (a, b) in pairs if a != b), min(len(said), len(expected)))
        return len(right) / self.rows, first
