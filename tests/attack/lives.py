# SPDX-License-Identifier: Apache-2.0
"""Random lives of the scheduler's state machine, without Hypothesis: many times as many a second.

The rules and what they check are those of `tests/scheduler/test_scheduler_machine.py`; here a
seeded generator draws their arguments. A life is a list of operations, which runs again as it is,
so that a life that fails is cut down to the operations that it needs.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

from tests.scheduler.harness import Setup
from tests.scheduler.test_scheduler_machine import (
    INTERFERENCES,
    OVERRIDES,
    SALTS,
    SPANS,
    SchedulerMachine,
)
from tests.scheduler.variants import VARIANTS

# A rule and its arguments.
Operation = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Life:
    """What a life does, from an empty pool to an empty pool."""

    variant: str
    spare: int  # blocks that the pool has beyond those of the longest prompt
    worker_seed: int
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        lines = [f"{name}(**{arguments!r})" for name, arguments in self.operations]
        head = f"{self.variant}: start(spare={self.spare}, seed={self.worker_seed})"
        return "\n  ".join([head, *lines, "teardown()"])


@dataclass
class Done:
    """What lives have done so far."""

    lives: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.operations.total()


def draw_life(seed: str, variant: str) -> Life:
    """The life of that seed: the same on every call."""
    source = random.Random(f"{seed}/{variant}")
    setup = VARIANTS[variant]
    spare, worker_seed = source.randint(0, 60), source.randrange(1 << 16)
    count = source.choice([20, 40, 40, 80, 160])
    operations = tuple(_draw_operation(source, setup) for _ in range(count))
    return Life(variant, spare, worker_seed, operations)


def _draw_operation(source: random.Random, setup: Setup) -> Operation:
    rule = source.choices(["add", "steps", "interfere", "process"], [3, 4, 2, 1])[0]
    if rule == "add":
        count = source.randint(1, 4)
        return rule, {"prompts": [_draw_prompt(source) for _ in range(count)]}
    if rule == "steps":
        return rule, {"count": source.choice([1, 2, 3, source.randint(1, 12)])}
    if rule == "interfere":
        return rule, {"which": source.randrange(64), "how": source.choice(INTERFERENCES)}
    return rule, {}


def _draw_prompt(source: random.Random) -> tuple[Any, ...]:
    length = source.choice([source.randint(1, 64), source.randint(1, 8), 9, 10, 32, 64])
    tree = source.choice([0, 5, 16, 40, 96]), source.randrange(3)
    origin = source.choice([tree, source.randrange(64)])
    tokens = source.randint(1, 32)
    settings = source.choice(OVERRIDES), origin, source.choice(SALTS), source.choice(SPANS)
    return length, tokens, *settings


@cache
def _machine(variant: str) -> type[SchedulerMachine]:
    """The machine of a variant, which counts the scheduler's operations in `done`."""

    class Machine(SchedulerMachine):
        setup = VARIANTS[variant]
        depth = 2 if setup.asynchronous or setup.stages else 1
        seen: ClassVar[Counter[str]] = Counter()
        done: ClassVar[Counter[str]] = Counter()

        def step(self) -> None:
            self.done["schedule"] += 1
            super().step()

        def process(self) -> None:
            self.done["update_from_output"] += 1
            super().process()

    return Machine


def live(life: Life, done: Done | None = None) -> None:
    """Run a life; every operation is followed by the machine's invariants."""
    kind = _machine(life.variant)
    kind.seen.clear()
    kind.done.clear()
    machine = kind()
    machine.start(life.spare, life.worker_seed, events=life.worker_seed % 2 == 1)
    for rule, arguments in life.operations:
        if rule == "interfere":
            if not machine.scheduler.requests:
                continue
            kind.done[arguments["how"]] += 1
        if rule == "process" and not machine.in_flight:
            continue
        getattr(machine, rule)(**arguments)
        machine.accounts_balance()
        machine.every_layer_holds_its_share()
    machine.teardown()
    if done is not None:
        done.lives += 1
        done.operations += kind.done
        done.operations["add_request"] += machine.num_requests
        done.seen += kind.seen


def shrink(life: Life, seconds: float) -> Life:
    """A life that fails as this one does, with as few operations as the time allows."""
    end = time.monotonic() + seconds
    kind = _failure(life)
    size = max(len(life.operations) // 2, 1)
    while time.monotonic() < end:
        start, shorter = 0, False
        while start < len(life.operations) and time.monotonic() < end:
            fewer = life.operations[:start] + life.operations[start + size :]
            if _failure(candidate := replace(life, operations=fewer)) == kind:
                life, shorter = candidate, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(size // 2, 1)
    return life


def _failure(life: Life) -> type[BaseException] | None:
    try:
        live(life)
    except Exception as error:
        return type(error)
    return None
