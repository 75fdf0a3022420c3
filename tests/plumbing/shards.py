# SPDX-License-Identifier: Apache-2.0
"""Deal the files of slow tests out to shards of about equal time."""

from __future__ import annotations

from collections.abc import Iterable

# Processor seconds of the longest files of slow tests; others count as `OTHERS`.
SECONDS: dict[str, float] = {}
OTHERS = 60.0


def files_of_shard(files: Iterable[str], number: int, count: int) -> set[str]:
    """Return the files of shard `number` of `count`, from 0.

    The longest file goes to the shard with the least time, and so on: every file is in exactly one
    shard, and the shards depend on nothing but the files.

    Raises:
        ValueError: there is no such shard.
    """
    if not 0 <= number < count:
        raise ValueError(f"there are shards 0 to {count - 1}, and no shard {number}")
    shards: list[set[str]] = [set() for _ in range(count)]
    sums = [0.0] * count
    for file in sorted(files, key=lambda name: (-SECONDS.get(name, OTHERS), name)):
        least = sums.index(min(sums))
        shards[least].add(file)
        sums[least] += SECONDS.get(file, OTHERS)
    return shards[number]
