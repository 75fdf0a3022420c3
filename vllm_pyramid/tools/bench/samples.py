# SPDX-License-Identifier: Apache-2.0
"""Samples: what one repetition of one variant gave, as a flat dictionary.

`results.py` makes medians, ranges and ratios of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_pyramid.tools.bench.cost import Machine
from vllm_pyramid.tools.store import Store, key_of

Sample = dict[str, Any]
PERCENTILES = (50, 90, 99)
# Of fewer requests the 99th percentile says no more than the slowest, and is left out.
FEWEST_FOR_P99 = 20


class Step(NamedTuple):
    """One step of an engine.

    Attributes:
        seconds: its time. prompt_tokens: of prompts, processed in it.
        decoding: requests that got a token and whose prompt had been processed before it.
        waiting: whether a request waited for admission after it. finished: requests that had
            finished before it. blocks: allocated after it, in blocks of one layer.
    """

    seconds: float
    prompt_tokens: int
    decoding: int
    waiting: bool
    finished: int
    blocks: int


class Timing(NamedTuple):
    """A request: seconds from when it was sent to its first and to its last token."""

    first: float
    last: float
    tokens: int


class Request(NamedTuple):
    """A request of an engine: its times, its prompt's tokens, those that were in the prefix cache,
    and whether it evicted.
    """

    timing: Timing
    prompt_len: int
    cached: int
    evicted: bool


def engine_sample(steps: Sequence[Step], requests: Sequence[Request], preemptions: int) -> Sample:
    """A whole job of an engine.

    Steady decode steps are those without prompt tokens, while requests wait for admission (the KV
    cache is as full as it gets) or before the first request has finished.
    """
    timings = [request.timing for request in requests]
    pure = [step for step in steps if not step.prompt_tokens]
    steady = [step for step in pure if step.decoding and (step.waiting or not step.finished)]
    seconds = sum(step.seconds for step in steps)
    decoded = sum(step.decoding for step in steady)
    return {
        "output_tokens_per_s": sum(timing.tokens for timing in timings) / seconds,
        "decode_tokens_per_s": decoded / sum(s.seconds for s in steady) if steady else None,
        "decode_batch": decoded / len(steady) if steady else None,
        "prefill_share": sum(s.seconds for s in steps if s.prompt_tokens) / seconds,
        "resident_max": max(step.decoding for step in steps),
        "peak_blocks": max(step.blocks for step in steps),
        "decode_blocks": max((step.blocks for step in pure), default=None),
        "preemptions": preemptions,
        **latencies(timings),
        **_cached(requests),
    }


def _cached(requests: Sequence[Request]) -> dict[str, float]:
    """The share of prompts that was in the prefix cache, and what that does for the first token."""
    hits = [1e3 * r.timing.first for r in requests if r.cached]
    if not hits:
        return {}
    found = sum(r.cached for r in requests) / sum(r.prompt_len for r in requests)
    misses = [1e3 * r.timing.first for r in requests if not r.cached]
    return {
        "cached_share": found,
        "ttft_hit_ms": float(np.median(hits)),
        **({"ttft_miss_ms": float(np.median(misses))} if misses else {}),
    }


def peer_sample(answer: Mapping[str, Any]) -> Sample:
    """The same of a peer's answer (see `peer.py`)."""
    timings = [Timing(*timing) for timing in answer["timings"]]
    return {
        "output_tokens_per_s": sum(timing.tokens for timing in timings) / answer["seconds"],
        "decode_tokens_per_s": answer["decode_tokens_per_s"],
        "decode_batch": answer["batch"],
        "prefill_share": answer["prefill_seconds"] / answer["seconds"],
        "resident_max": answer["batch"],
        **latencies(timings),
    }


def latencies(timings: Sequence[Timing]) -> dict[str, float]:
    """Percentiles of the time to the first token and of the time per token after it."""
    times = {
        "ttft": [1e3 * timing.first for timing in timings],
        "tpot": [1e3 * (t.last - t.first) / (t.tokens - 1) for t in timings if t.tokens > 1],
    }
    return {
        f"{name}_p{percent}_ms": float(np.percentile(values, percent))
        for name, values in times.items()
        for percent in percentiles_of(len(timings))
        if values
    }


def percentiles_of(requests: int) -> tuple[int, ...]:
    """The percentiles that mean something of so many requests."""
    return PERCENTILES if requests >= FEWEST_FOR_P99 else PERCENTILES[:-1]


def now() -> str:
    """The time, as it is written in files."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class SampleStore:
    """The repetitions of a run in a file, so that an interrupted run goes on. Use it in `with`.

    A run that ends well removes the file: the same command then measures again. So all samples of a
    row are of one run. Each repetition says when and where it was measured.

    Args:
        path: of the file. identity: all that the results depend on beside the pools; repetitions
            of a run with another identity are not used. fresh: forget what is there.

    Attributes:
        places: date, processor and rates of the machine, of every repetition loaded or saved.
    """

    def __init__(self, path: Path, identity: Any, *, fresh: bool) -> None:
        self._path, self._identity = path, identity
        self._store = Store(path, fresh=fresh)
        self.places: list[dict[str, Any]] = []

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._store.close()
        if kind is None:
            self._path.unlink()

    def has(self, pool: float, number: int) -> bool:
        """Whether a repetition has been measured."""
        return self._store.get(key_of(self._identity, pool, number)) is not None

    def load(self, pool: float, number: int) -> list[Sample] | None:
        """A repetition of all variants; None if it is still to be measured."""
        known = self._store.get(key_of(self._identity, pool, number))
        if known is None:
            return None
        self.places.append(known["place"])
        samples: list[Sample] = known["samples"]
        return samples

    def save(
        self,
        pool: float,
        number: int,
        samples: Sequence[Sample],
        processor: str,
        machine: Machine | None,
    ) -> None:
        """Keep a repetition of all variants."""
        place: dict[str, Any] = {"date": now(), "processor": processor}
        if machine is not None:
            place |= {"bandwidth": machine.bandwidth, "flops": machine.flops}
        self.places.append(place)
        # `Store` takes a line that ends with two braces for a whole one: the list comes last.
        entry = {"place": place, "samples": list(samples)}
        self._store.put(key_of(self._identity, pool, number), entry)

    @property
    def machine(self) -> Machine | None:
        """The machine's rates: the best of all processes, since they are bounds."""
        rates = [(place["bandwidth"], place["flops"]) for place in self.places if "flops" in place]
        return Machine(*map(max, zip(*rates, strict=True))) if rates else None
