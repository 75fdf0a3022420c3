# SPDX-License-Identifier: Apache-2.0
"""Tables to be translated from CSV to JSON lines: the prompts, and the score of an answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

COLUMNS = ("order", "customer", "city")
NAMES = "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karin Lukas Maria Nora"
CITIES = "Berlin Lisbon Oslo Madrid Vienna Dublin Athens Warsaw Prague Rome Paris Zurich"
OPENING = "```jsonl\n"  # of the answer; part of the prompt


@dataclass(frozen=True)
class Table:
    """Rows of values in the order of COLUMNS."""

    rows: list[tuple[Any, ...]]

    @classmethod
    def drawn(cls, rows: int, seed: int) -> Table:
        """Draw a table, equal for equal seeds; its order numbers rise and none comes twice."""
        draw = random.Random(seed)
        orders = sorted(draw.sample(range(10_000, 100_000), rows))
        names, cities = NAMES.split(), CITIES.split()
        return cls([(order, draw.choice(names), draw.choice(cities)) for order in orders])

    @property
    def lines(self) -> list[str]:
        """Return the right answer's lines."""
        return [json.dumps(dict(zip(COLUMNS, row, strict=True))) for row in self.rows]

    @property
    def question(self) -> str:
        """Return the question to the model, with an example of one line."""
        example = (12345, "Peter", "Hamburg")
        csv = "\n".join(",".join(map(str, row)) for row in self.rows)
        return (
            "Translate each row of this CSV file to one JSON object on a line of its own, in the "
            "same order. Write all rows, and nothing else. The row "
            f"`{','.join(map(str, example))}` becomes "
            f"`{json.dumps(dict(zip(COLUMNS, example, strict=True)))}`.\n\n"
            f"{','.join(COLUMNS)}\n{csv}\n"
        )

    def score(self, answer: str) -> tuple[float, int]:
        """Return the share of rows that the answer has, and how many lines come before a wrong one.

        A row is right wherever its line stands, a line only at its place. Lines without a JSON
        object at their beginning (fences, blank ones) are no lines of the answer.
        """
        said = json_objects(answer)
        expected = [json.loads(line) for line in self.lines]
        right = sum(row in said for row in expected)
        pairs = enumerate(zip(said, expected, strict=False))
        first = next((index for index, (a, b) in pairs if a != b), min(len(said), len(expected)))
        return right / len(expected), first


def json_objects(answer: str) -> list[Any]:
    """Return the JSON objects of an answer's lines, "" for broken ones."""
    return [value for line in answer.splitlines() if (value := _object(line)) is not None]


def _object(line: str) -> Any:
    """Return the JSON object of a line, "" for a broken one, None where the line begins none."""
    text = line.strip().rstrip(",")
    if not text.startswith("{"):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return ""
