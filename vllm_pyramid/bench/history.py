# SPDX-License-Identifier: Apache-2.0
"""Repetitions of a run in a file, so that a run that was interrupted goes on.

A run that has all of its repetitions is over: the same command then measures afresh. What a row is
made of is therefore always of one run, and each repetition says when and where it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.measure import Measurement
from vllm_pyramid.store import Store, key_of

__all__ = ["History", "now"]


def now() -> str:
    """The time, as it stands in files."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class History:
    """What a run has measured.

    Args:
        identity: all that its results depend on; another run with the same one may be gone on with.
        pools, repetitions: each pool is measured so many times.
        processor: on which is measured now. fresh: begin anew in any case.

    Attributes:
        begun: when the run began, perhaps in an earlier process.
        found: repetitions that an earlier process has measured.
        places: date, processor and the machine's rates of every repetition taken or put, in order.
    """

    def __init__(
        self,
        store: Store,
        identity: Any,
        pools: Sequence[float],
        repetitions: int,
        *,
        processor: str,
        fresh: bool = False,
    ) -> None:
        self._store = store
        self._processor = processor
        self._run = key_of(identity, list(pools), repetitions)
        self.places: list[dict[str, Any]] = []
        wanted = [(pool, number) for pool in pools for number in range(repetitions)]
        earlier = store.get(self._run)
        if earlier is not None and not fresh:
            self.begun: str = earlier["begun"]
            self.found = sum(store.get(self._key(*which)) is not None for which in wanted)
            if self.found < len(wanted):
                return
        self.begun, self.found = now(), 0
        store.put(self._run, {"begun": self.begun})

    def _key(self, pool: float, number: int) -> str:
        return key_of(self._run, self.begun, pool, number)

    def take(self, pool: float, number: int) -> list[Measurement] | None:
        """A repetition, of all variants; None if it is still to be measured."""
        known = self._store.get(self._key(pool, number))
        if known is None:
            return None
        self.places.append(known["place"])
        return [Measurement(**run) for run in known["runs"]]

    def put(self, pool: float, number: int, runs: Sequence[Measurement], machine: Machine) -> None:
        """Keep a repetition of all variants, and the rates measured in this process."""
        place = {
            "date": now(),
            "processor": self._processor,
            "bandwidth": machine.bandwidth,
            "flops": machine.flops,
        }
        self.places.append(place)
        # `Store` knows a line that was cut off by its end: the list comes last.
        entry = {"place": place, "runs": [asdict(run) for run in runs]}
        self._store.put(self._key(pool, number), entry)

    @property
    def machine(self) -> Machine:
        """The machine's rates: the best of the processes that measured, since they are bounds."""
        return Machine(
            max((place["bandwidth"] for place in self.places), default=0.0),
            max((place["flops"] for place in self.places), default=0.0),
        )
