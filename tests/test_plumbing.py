# SPDX-License-Identifier: Apache-2.0
"""What chooses and judges tests: pairs of settings, shards, time budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plumbing.budgets import OF_A_FILE, Budgets
from tests.plumbing.pairwise import covering
from tests.plumbing.shards import PARTS, shard_members


def test_every_pair_is_covered() -> None:
    variants = {"ab": "ab", "bc": "bc", "abc": "abc", "d": "d", "ac": "ac"}
    assert covering(variants) == ["abc", "d"]


def test_every_test_is_in_one_shard() -> None:
    files = [f"tests/test_{number}.py" for number in range(20)]
    tests = [f"{file}::test_{name}" for file in files for name in "ab"]
    shards = [shard_members(tests, number, 6) for number in range(6)]
    assert sorted(name for shard in shards for name in shard) == sorted(tests)
    assert {len(shard) for shard in shards} == {6, 8}, "files stay together"
    assert [shard_members(tests, number, 6) for number in range(6)] == shards
    (file, parts) = next(iter(PARTS.items()))
    long = [f"{file}::test[{number}]" for number in range(10)]
    assert sum(bool(shard_members(long, number, 14)) for number in range(14)) == parts
    with pytest.raises(ValueError, match="shards 0 to 5, and no shard 6"):
        shard_members(tests, 6, 6)


class Item:
    def __init__(self, *marks: str) -> None:
        self.nodeid, self.marks = "tests/test_a.py::test_b", marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


@pytest.mark.parametrize(
    ("marks", "seconds", "imports", "over"),
    [
        (("cpu",), 1.9, False, None),
        (("cpu",), 2.1, False, "took 2.1 s; a test marked cpu has 2 s"),
        (("cpu",), 9.0, True, None),
        (("cpu", "slow"), 90.0, False, None),
        (("engine",), 14.0, False, None),
        (("engine",), 16.0, False, "took 16.0 s; a test marked engine has 15 s"),
    ],
)
def test_a_slow_test_is_found(marks, seconds, imports, over) -> None:
    item: Any = Item(*marks)
    assert Budgets().judge(item, seconds, imports=imports) == over
    assert Budgets(scale=10).judge(item, seconds, imports=imports) is None


def test_a_slow_file_is_found(tmp_path: Path) -> None:
    budgets, item, exempt = Budgets(), Item("engine"), Item("engine", "long")
    assert budgets.judge(exempt, 500.0, imports=False) is None  # type: ignore[arg-type]
    found = [budgets.judge(item, 14.0, imports=False) for _ in range(5)]  # type: ignore[arg-type]
    assert found[:4] == [None] * 4
    assert found[4] == f"tests/test_a.py took 70 s so far; a file has {OF_A_FILE:.0f} s"
    budgets.write(tmp_path / "times", "gw0")
    assert "14.0" in (tmp_path / "times" / "gw0.json").read_text()
