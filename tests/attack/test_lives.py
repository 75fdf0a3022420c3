# SPDX-License-Identifier: Apache-2.0
"""A short soak of the scheduler's state machine, and lives that failed once."""

from __future__ import annotations

import pytest

from tests.attack.lives import Life, live, shrink
from tests.attack.soak import life_of, soak
from tests.scheduler.test_scheduler_machine import SchedulerMachine

pytestmark = [pytest.mark.cpu, pytest.mark.long]

OPERATIONS = 20_000  # ten seconds of a core; `make soak` does a million

# A request inside whose prompt evictions fall, alone at first, with chunks longer than others would
# leave it: it held more than admission counted.
ALONE = Life(
    "stages-forecast-inside",
    12,
    25786,
    (
        ("add", {"prompts": [(64, 22, {"other": 1}, (40, 2), None, ())]}),
        ("steps", {"count": 1}),
        ("steps", {"count": 9}),
    ),
)


def test_soak(seed: int) -> None:
    """Other lives in every run."""
    done, failed = soak(seed, OPERATIONS, shrinking=60.0)
    assert not failed, "\n".join(
        f"SOAK_SEED={seed} SOAK_LIFE={one.number} make soak\n{one.reason}\n{one.shortest}"
        for one in failed
    )
    print(f"{done.total} operations, {done.lives} lives, {dict(done.seen)}")
    happenings = ("evicted", "preempted", "hits", "abort", "stop", "preempt all", "mixed steps")
    assert all(done.seen[name] for name in happenings), done.seen


@pytest.mark.parametrize("life", [ALONE], ids=["alone"])
def test_lives_that_failed(life: Life) -> None:
    live(life)


def test_a_failing_life_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault that only an abort meets, of a life of many operations one or two remain."""

    def leak(machine: SchedulerMachine) -> None:
        assert not machine.seen["abort"], "injected"

    monkeypatch.setattr(SchedulerMachine, "accounts_balance", leak)
    seeds = (life_of(1, number) for number in range(100))
    life = next(life for life in seeds if _aborts(life) and len(life.operations) >= 80)
    with pytest.raises(AssertionError, match="injected"):
        live(life)
    shortest = shrink(life, 60)
    assert [name for name, _ in shortest.operations] == ["add", "interfere"]


def _aborts(life: Life) -> bool:
    return any(arguments.get("how") == "abort" for _, arguments in life.operations)
