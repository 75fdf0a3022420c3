# SPDX-License-Identifier: Apache-2.0
"""Samples: what one repetition of one variant gave, as a flat dictionary for `report.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Sample = dict[str, Any]
PERCENTILES = (50, 90, 95, 99)
# Of fewer requests the 99th percentile says no more than the slowest, and is left out.
FEWEST_FOR_P99 = 20


class Step(NamedTuple):
    """One step of an engine.

    Attributes:
        seconds: its time.
        prompt_tokens: of prompts, processed in it.
        decoding: requests that got a token and whose prompt had been processed before it.
        waiting: whether a request waited for admission after it.
        finished: requests that had finished before it.
        blocks: allocated after it, in blocks of one layer.
    """

    seconds: float
    prompt_tokens: int
    decoding: int
    waiting: bool
    finished: int
    blocks: int


class Request(NamedTuple):
    """A request that has finished.

    Attributes:
        first, last: seconds from when it was sent to its first and to its last token.
        tokens: that it generated.
        prompt_len: tokens of its prompt.
        cached: tokens of its prompt that were in the prefix cache.
        evicted: whether it evicted.
    """

    first: float
    last: float
    tokens: int
    prompt_len: int
    cached: int = 0
    evicted: bool = False


def engine_sample(steps: Sequence[Step], requests: Sequence[Request], preemptions: int) -> Sample:
    """Return the sample of a whole job of an engine.

    Steady decode steps are those without prompt tokens, while requests wait for admission (the KV
    cache is as full as it gets) or before the first request has finished.
    """
    pure = [step for step in steps if not step.prompt_tokens]
    steady = [step for step in pure if step.decoding and (step.waiting or not step.finished)]
    seconds = sum(step.seconds for step in steps)
    decoded = sum(step.decoding for step in steady)
    return {
        "output_tokens_per_s": sum(request.tokens for request in requests) / seconds,
        "decode_tokens_per_s": decoded / sum(s.seconds for s in steady) if steady else None,
        "decode_batch": decoded / len(steady) if steady else None,
        "prefill_share": sum(s.seconds for s in steps if s.prompt_tokens) / seconds,
        "resident_max": max(step.decoding for step in steps),
        "peak_blocks": max(step.blocks for step in steps),
        "decode_blocks": max((step.blocks for step in pure), default=None),
        "preemptions": preemptions,
        **latencies(requests),
        **_cached(requests),
    }


def _cached(requests: Sequence[Request]) -> dict[str, float]:
    """Return the share of prompts in the prefix cache, and first-token times of hit and miss."""
    hits = [1e3 * request.first for request in requests if request.cached]
    if not hits:
        return {}
    found = sum(r.cached for r in requests) / sum(r.prompt_len for r in requests)
    misses = [1e3 * request.first for request in requests if not request.cached]
    made = {"cached_share": found, "ttft_hit_ms": float(np.median(hits))}
    return made | ({"ttft_miss_ms": float(np.median(misses))} if misses else {})


def latencies(requests: Sequence[Request]) -> dict[str, float]:
    """Return percentiles of the time to the first token and of the time per token after it."""
    times = {
        "ttft": [1e3 * request.first for request in requests],
        "tpot": [1e3 * (r.last - r.first) / (r.tokens - 1) for r in requests if r.tokens > 1],
    }
    return {
        f"{name}_p{percent}_ms": float(np.percentile(values, percent))
        for name, values in times.items()
        for percent in percentiles_of(len(requests))
        if values
    }


def percentiles_of(requests: int) -> tuple[int, ...]:
    """Return the percentiles that mean something for this many requests."""
    return PERCENTILES if requests >= FEWEST_FOR_P99 else PERCENTILES[:-1]
