# SPDX-License-Identifier: Apache-2.0
"""Count rows by the requests that have them in their tables.

    positions   0 .. 15   16 .. 31   32 .. 47   48 .. 63
    request a   [ row 0 ] [ row 1 ]  [ row 2 ]               {a, b, c}: 2
    request b   [ row 0 ] [ row 1 ]  [ row 2 ]  [ row 3 ]    {a, b}: 1
    request c   [ row 0 ] [ row 1 ]  [ row 4 ]               {b}: 1   {c}: 1

Prefixes are a tree, so there are few such sets, however many rows there are: a question about what
requests share looks at the sets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

from vllm_pyramid.kv_cache.bundles import BlockBundle

Requests = frozenset[str]
_HOLDERS = attrgetter("holders")


class SharedBlockIndex:
    """Rows in use by who has them, kept up to date as requests begin with, publish and leave rows.

    Attributes:
        rows: how many rows each set of requests has, those of one request alone included.
    """

    def __init__(self) -> None:
        self.rows: dict[Requests, int] = {}

    def add(self, request_id: str, rows: Iterable[BlockBundle]) -> None:
        """A request has these rows, too."""
        self._move(rows, lambda holders: holders | {request_id})

    def remove(self, request_id: str, rows: Iterable[BlockBundle]) -> None:
        """It has them no longer."""
        self._move(rows, lambda holders: holders - {request_id})

    def shared(self, request_id: str, rows: Iterable[BlockBundle]) -> dict[Requests, int]:
        """Rows that more than one request has, if a request without any began with these."""
        counts = {holders: count for holders, count in self.rows.items() if len(holders) > 1}
        for holders, same in groupby(rows, key=_HOLDERS):
            if holders:
                count = sum(1 for _ in same)
                if len(holders) > 1:
                    counts[holders] -= count
                both = holders | {request_id}
                counts[both] = counts.get(both, 0) + count
        return {holders: count for holders, count in counts.items() if count}

    def _move(self, rows: Iterable[BlockBundle], change: Callable[[Requests], Requests]) -> None:
        for holders, same in groupby(list(rows), key=_HOLDERS):
            changed, count = change(holders), 0
            for row in same:
                row.holders = changed
                count += 1
            self._count(holders, -count)
            self._count(changed, count)

    def _count(self, holders: Requests, count: int) -> None:
        left = self.rows.get(holders, 0) + count
        assert left >= 0 or not holders, "rows that nobody had"
        if holders and left:
            self.rows[holders] = left
        else:
            self.rows.pop(holders, None)
