# SPDX-License-Identifier: Apache-2.0
"""Count bundles by the requests that have them in their tables.

    positions   0 .. 15    16 .. 31   32 .. 47   48 .. 63
    request a   [ b0 ]     [ b1 ]     [ b2 ]                {a, b, c}: 2
    request b   [ b0 ]     [ b1 ]     [ b2 ]     [ b3 ]     {a, b}: 1
    request c   [ b0 ]     [ b1 ]     [ b4 ]                {b}: 1   {c}: 1

A request has some of its bundles to its end, the others until its first eviction; the sets tell
which. Prefixes form a tree, so there are few such sets, however many bundles there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from vllm_pyramid.kv_cache.bundles import BlockBundle


class Holder(NamedTuple):
    """A request that has a bundle in its tables, and whether it keeps it to its end."""

    request_id: str
    to_end: bool


Requests = frozenset[Holder]
_HOLDERS = attrgetter("holders")


class SharedBlockIndex:
    """The number of bundles that each set of requests has, kept up to date as tables change.

    `counts` has the bundles by their set of requests, sets of one request included.
    """

    def __init__(self) -> None:
        self.counts: dict[Requests, int] = {}

    def add(self, request_id: str, bundles: Sequence[BlockBundle], to_end: int = 0) -> None:
        """Record that a request has these bundles, too, and the first `to_end` to its end."""
        for part, lasts in ((bundles[:to_end], True), (bundles[to_end:], False)):
            self._move(part, frozenset({Holder(request_id, lasts)}).union)

    def remove(self, request_id: str, bundles: Iterable[BlockBundle]) -> None:
        """Record that a request no longer has these bundles."""
        either = {Holder(request_id, False), Holder(request_id, True)}
        self._move(bundles, lambda holders: holders - either)

    def shared(
        self, request_id: str, bundles: Sequence[BlockBundle], to_end: int = 0
    ) -> dict[Requests, int]:
        """Count the bundles that several requests would have if a request began with `bundles`."""
        counts = {holders: count for holders, count in self.counts.items() if len(holders) > 1}
        for part, lasts in ((bundles[:to_end], True), (bundles[to_end:], False)):
            for holders, same in groupby(part, key=_HOLDERS):
                if holders:
                    count = sum(1 for _ in same)
                    if len(holders) > 1:
                        counts[holders] -= count
                    both = holders | {Holder(request_id, lasts)}
                    counts[both] = counts.get(both, 0) + count
        return {holders: count for holders, count in counts.items() if count}

    def _move(self, bundles: Iterable[BlockBundle], change: Callable[[Requests], Requests]) -> None:
        for holders, same in groupby(list(bundles), key=_HOLDERS):
            changed, count = change(holders), 0
            for bundle in same:
                bundle.holders = changed
                count += 1
            self._count(holders, -count)
            self._count(changed, count)

    def _count(self, holders: Requests, change: int) -> None:
        count = self.counts.get(holders, 0) + change
        if count < 0 and holders:
            raise RuntimeError(
                f"{-change} bundles were removed, {-count} more than there were; report this"
            )
        if holders and count:
            self.counts[holders] = count
        else:
            self.counts.pop(holders, None)
