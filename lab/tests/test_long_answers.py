# SPDX-License-Identifier: Apache-2.0
"""The tables and sums that `lab.long_answers` draws, and the scores of answers."""

from __future__ import annotations

import json

import pytest

from lab.long_answers.sums import Sums
from lab.long_answers.table import COLUMNS, Table

pytestmark = pytest.mark.cpu
TABLE = Table.drawn(5, seed=3)


def test_tables_follow_their_seed_and_no_row_comes_twice() -> None:
    assert Table.drawn(5, seed=3) == TABLE != Table.drawn(5, seed=4)
    assert len({row[0] for row in Table.drawn(500, seed=1).rows}) == 500
    csv = TABLE.question.split("\n\n")[1].splitlines()
    assert csv[0] == ",".join(COLUMNS)
    for text, line in zip(csv[1:], TABLE.lines, strict=True):
        assert text.split(",") == [str(value) for value in json.loads(line).values()]


def test_right_rows_count_at_any_place_and_lines_at_theirs() -> None:
    lines = TABLE.lines
    assert TABLE.score("\n".join([*lines, "```", "Done."])) == (1.0, 5)
    assert TABLE.score("\n\n".join([*lines[:2], *lines[3:]])) == (0.8, 2)
    assert TABLE.score("\n".join([lines[0], lines[1][:-9], *lines[2:]])) == (0.8, 1)
    assert TABLE.score("\n".join(lines[:3])) == (0.6, 3)
    wrong = json.dumps(json.loads(lines[0]) | {"order": str(TABLE.rows[0][0])})
    assert TABLE.score("\n".join([wrong, *lines[1:]])) == (0.8, 0)
    assert TABLE.score("") == (0.0, 0)


def test_a_line_of_a_sum_is_right_behind_the_line_before_it() -> None:
    sums = Sums(start=100, step=7, rows=4)
    lines = sums.lines
    assert [json.loads(line)["value"] for line in lines] == [100, 107, 114, 121]
    assert sums.question.endswith("\n".join(lines[:3]) + "\n")
    assert sums.score("\n".join([*lines, "Done."])) == (1.0, 4)
    slip = [lines[0], '{"line": 2, "value": 108}', '{"line": 3, "value": 115}', lines[3]]
    assert sums.score("\n".join(slip)) == (0.5, 1)
    assert sums.score("\n".join([lines[0], lines[1], lines[0], lines[1]])) == (0.5, 2)
    for broken in ('{"line": 2, "value": "x"}', '{"value": 107}', '{"line": 2'):
        assert sums.score("\n".join([lines[0], broken, lines[2], lines[3]])) == (0.5, 1)
    assert sums.score("") == (0.0, 0)
    assert Sums.drawn(4, seed=1) == Sums.drawn(4, seed=1) != Sums.drawn(4, seed=2)
