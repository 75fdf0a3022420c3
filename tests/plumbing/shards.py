# SPDX-License-Identifier: Apache-2.0
"""Deal slow tests out to shards of about equal time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# Processor seconds of the longest files of slow tests; others count as `OTHERS`.
SECONDS: dict[str, float] = {
    "tests/kernels/test_sanitizers.py": 460.0,
    "tests/kernels/test_triton_matrix.py": 300.0,
    "tests/scheduler/test_scheduler_machine.py": 800.0,
    "lab/tests/test_quality_tables.py": 300.0,
    "tests/e2e/test_one_model_on_two_hosts.py": 150.0,
}
OTHERS = 60.0
# Files whose tests do not need one another, and in how many parts they are dealt out.
PARTS = {"tests/scheduler/test_scheduler_machine.py": 5}


def shard_members(nodeids: Iterable[str], number: int, count: int) -> set[str]:
    """Return the tests of shard `number` of `count`, from 0.

    The longest file goes to the shard with the least time, and so on: every test is in exactly one
    shard, and the shards depend on nothing but the tests' names. A file stays together, unless
    `PARTS` has it.

    Raises:
        ValueError: there is no such shard.
    """
    if not 0 <= number < count:
        raise ValueError(f"there are shards 0 to {count - 1}, and no shard {number}")
    seen: Counter[str] = Counter()
    units: dict[tuple[str, int], list[str]] = {}
    for nodeid in nodeids:
        file = nodeid.partition("::")[0]
        units.setdefault((file, seen[file] % PARTS.get(file, 1)), []).append(nodeid)
        seen[file] += 1
    shards: list[set[str]] = [set() for _ in range(count)]
    sums = [0.0] * count
    for unit in sorted(units, key=lambda unit: (-_seconds(unit[0]), unit)):
        least = sums.index(min(sums))
        shards[least].update(units[unit])
        sums[least] += _seconds(unit[0])
    return shards[number]


def _seconds(file: str) -> float:
    """Return the seconds of a file, or of one of its parts."""
    return SECONDS.get(file, OTHERS) / PARTS.get(file, 1)
