# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes: `vllm-pyramid bench throughput --decode-only --profile`.

    in the engine's process   `profile`       steps with and without timers, one by one
    in the bench's            `step_profile`  the result, and `table`

Every other step has timers around its functions (`compat/step_functions.py`). The others run as
without a profile. Both kinds are reported: the difference is what the timers cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from rich.table import Table

from vllm_pyramid.tools.bench.job import Variant

# The parts of a step, by what the table calls the group of them.
GROUPS: dict[str, dict[str, str]] = {
    "attention": {"attention": ""},
    "writing keys and values": {"cache_write": ""},
    "eviction, gathering mass": {"eviction": ""},
    "linear layers": {"linear": ""},
    "other operators": {
        "norm": "norms",
        "rotary": "rotary embedding",
        "activation": "activation",
        "embedding": "embedding",
        "sampling": "sampling",
        "between": "rest of the forward pass",
    },
    "engine": {
        "policy": "policy and metadata",
        "inputs": "preparing inputs",
        "scheduling": "scheduling",
        "outputs": "processing outputs",
        "rest": "rest",
    },
}
PARTS = tuple(part for group in GROUPS.values() for part in group)
WINDOWS = 2  # of the length of the timed ones: half of their steps have timers
_BLOCK = 16


class PartClock:
    """The time of each part of a step, for functions of one thread.

    Parts exclude each other: while a timed function runs inside another, the time is the inner
    one's. A switch takes about a microsecond.

    Attributes:
        spent: nanoseconds by part.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        self.spent = dict.fromkeys(parts, 0)
        self._running: list[str] = []
        self._since = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is `part`'s but for what timed functions that it calls take."""
        spent, running, now = self.spent, self._running, time.perf_counter_ns
        assert part in spent, part

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            if running:
                spent[running[-1]] += begin - self._since
            running.append(part)
            self._since = begin
            try:
                return function(*args, **kwargs)
            finally:
                end = now()
                spent[part] += end - self._since
                running.pop()
                self._since = end

        return call


def has_timers(index: int) -> bool:
    """Whether the step `index` of a profile is one with timers: every other one.

    Requests of equal length begin a block in the same step, every 16th: the turns change as often,
    or all those steps would be of one kind.
    """
    return (index + index // _BLOCK) % 2 == 0


def refusal(client: Any) -> str:
    """Why steps of vLLM's engine `client` cannot be profiled, in words; empty where they can."""
    from vllm_pyramid.compat.step_functions import step_functions

    try:
        step_functions(client)
    except ValueError as error:
        return str(error)
    return ""


def profile(client: Any, step: Callable[[], float], count: int) -> dict[str, Any]:
    """Do `count` steps, every other one with timers.

    Args:
        client: vLLM's engine. step: does one with it, and returns its seconds. count: at least 2.

    Returns:
        `with_timers` and `without`: seconds of every step. `parts`: seconds by part, over all steps
        with timers; their sum is that of `with_timers`.
    """
    from vllm_pyramid.compat.step_functions import step_functions

    clock = PartClock(PARTS)
    timers = [
        mock.patch.object(owner, name, clock.timed(part, getattr(owner, name)))
        for part, owner, name in step_functions(client)
    ]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for index in range(count):
        with_timers = has_timers(index)
        with ExitStack() as stack:
            for timer in timers if with_timers else ():
                stack.enter_context(timer)
            seconds[with_timers].append(step())
    parts = {part: spent / 1e9 for part, spent in clock.spent.items()}
    # What is outside of all timed functions: the bench's own loop around the engine's step.
    parts["rest"] += sum(seconds[True]) - sum(parts.values())
    return {"with_timers": seconds[True], "without": seconds[False], "parts": parts}


def step_profile(variant: Variant, batch: int, answer: dict[str, Any]) -> dict[str, Any]:
    """Of a variant's decode steps, from the answer of `profile`.

    Returns:
        batch: requests of a step. with_timers_ms, without_ms: of every step. parts_ms: means of
        the steps with timers by part, and shares: of such a step. step_ms, step_without_timers_ms:
        mean steps; the timers cost what the first is more.
    """
    with_timers, without = ([1e3 * s for s in answer[kind]] for kind in ("with_timers", "without"))
    step = statistics.fmean(with_timers)
    parts = {part: 1e3 * spent / len(with_timers) for part, spent in answer["parts"].items()}
    return {
        "policy": variant.name,
        "budget": variant.budget or "100%",
        "batch": batch,
        "with_timers_ms": with_timers,
        "without_ms": without,
        "parts_ms": parts,
        "step_ms": step,
        "step_without_timers_ms": statistics.fmean(without),
        "shares": {part: spent / step for part, spent in parts.items()},
    }


def table(profiles: Sequence[dict[str, Any]]) -> Table:
    """Parts in rows, variants in columns: milliseconds of a step, and the share of it."""
    steps = min(len(one["with_timers_ms"]) for one in profiles)
    made = Table(title=f"where a decode step's time goes: means of {steps} steps with timers")
    made.add_column("ms a step (share)", no_wrap=True)
    for one in profiles:
        budget = "" if one["budget"] == "100%" else f" {one['budget']}"
        made.add_column(f"{one['policy']}{budget}, batch {one['batch']}", justify="right")
    for group, parts in GROUPS.items():
        made.add_row(group, *(_cell(one, tuple(parts)) for one in profiles))
        for part, name in parts.items():
            if name:
                made.add_row(f"  {name}", *(_cell(one, (part,)) for one in profiles), style="dim")
    made.add_section()
    for name, key in (("the step", "step_ms"), ("a step without timers", "step_without_timers_ms")):
        made.add_row(name, *(f"{one[key]:.2f}" for one in profiles))
    return made


def _cell(profile: dict[str, Any], parts: Sequence[str]) -> str:
    spent = sum(profile["parts_ms"][part] for part in parts)
    return f"{spent:.2f} ({100 * spent / profile['step_ms']:.0f} %)"
