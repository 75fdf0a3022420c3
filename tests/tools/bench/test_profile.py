# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: parts that add up, timers that leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from vllm_pyramid.tools.bench.job import Variant
from vllm_pyramid.tools.bench.profile import (
    GROUPS,
    PARTS,
    PartClock,
    has_timers,
    profile,
    refusal,
    step_profile,
    table,
)


class Work:
    """Functions that take a set time, by a clock that stands still otherwise."""

    def __init__(self) -> None:
        self.now = 0

    def passes(self, nanoseconds: int) -> None:
        self.now += nanoseconds

    def outer(self) -> str:
        self.passes(10)
        self.inner()
        self.passes(20)
        self.inner()
        return "done"

    def inner(self) -> None:
        self.passes(3)
        self.innermost()

    def innermost(self) -> None:
        self.passes(100)

    def fails(self) -> None:
        self.passes(7)
        raise KeyError


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    made = Work()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: made.now)
    return made


@pytest.mark.cpu
def test_each_part_has_its_own_time(work: Work) -> None:
    clock = PartClock(("a", "b", "c"))
    with ExitStack() as timers:
        for part, name in (("a", "outer"), ("b", "inner"), ("a", "innermost"), ("c", "fails")):
            timed = clock.timed(part, getattr(work, name))
            timers.enter_context(mock.patch.object(work, name, timed))
        assert work.outer() == "done"
        assert clock.spent == {"a": 230, "b": 6, "c": 0}
        work.passes(1000)  # outside of all functions: nobody's
        for _ in range(2):
            with pytest.raises(KeyError):
                work.fails()
        work.inner()
    assert clock.spent == {"a": 330, "b": 9, "c": 14}
    work.outer()  # without timers
    assert clock.spent == {"a": 330, "b": 9, "c": 14}
    assert vars(work) == {"now": work.now}


@pytest.mark.cpu
def test_steps_in_which_blocks_begin_are_of_both_kinds() -> None:
    for first in range(16):
        kinds = [has_timers(index) for index in range(first, 64, 16)]
        assert kinds.count(True) == kinds.count(False) == 2
    kinds = [has_timers(index) for index in range(64)]
    assert kinds.count(True) == 32
    assert has_timers(0) and not has_timers(1)


@pytest.mark.cpu
def test_the_table_adds_up(work: Work) -> None:
    from rich.console import Console

    parts = {part: float(index + 1) / 1e3 for index, part in enumerate(PARTS)}
    total = sum(parts.values())
    answer = {"with_timers": [total / 2, total / 2], "without": [0.02], "parts": parts}
    made = step_profile(Variant("snapkv", "12%"), 3, answer)
    assert made["step_ms"] == pytest.approx(1e3 * total / 2)
    assert sum(made["parts_ms"].values()) == pytest.approx(made["step_ms"])
    assert sum(made["shares"].values()) == pytest.approx(1)
    assert made["step_without_timers_ms"] == 20.0
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table([made, made]))
    said = console.export_text()
    assert "snapkv 12%, batch 3" in said and "means of 2 steps" in said
    lines = {line.split("│")[1].strip(): line for line in said.splitlines() if "│" in line}
    for group, names in GROUPS.items():
        spent = sum(made["parts_ms"][part] for part in names)
        cell = f"{spent:.2f} ({100 * spent / made['step_ms']:.0f} %)"
        assert lines[group].count(cell) == 2
    assert "20.00" in lines["a step without timers"]


@pytest.fixture(scope="module")
def engine(random_model: Path) -> Iterator[Any]:
    """Of a policy that does something in every step."""
    from tests.engine.support import EnginePool

    pool = EnginePool()
    yield pool.get(random_model, max_model_len=512, kv_policy="h2o", kv_budget=64)
    pool.close()


@pytest.mark.engine
def test_the_parts_of_an_engine(engine: Any) -> None:
    """Every part takes time; the results, and the engine behind them, are as without timers."""
    from tests.engine.support import greedy, random_prompts

    prompts, params = random_prompts([160, 200, 220]), greedy(24)
    expected = [outcome.token_ids for outcome in engine.generate(prompts, params)]
    before = _own(engine)
    assert sum(function is not None for function in before) > 4 * 8  # products with weights

    tokens: dict[str, list[int]] = {}

    def step() -> float:
        begin = time.perf_counter()
        for output in engine.client.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        return time.perf_counter() - begin

    for index, prompt in enumerate(prompts):
        engine.client.add_request(str(index), {"prompt_token_ids": prompt}, params)
    step()
    answer = profile(engine.client, step, 22)
    assert len(answer["with_timers"]) == len(answer["without"]) == 11
    assert set(answer["parts"]) == set(PARTS)
    assert [part for part, spent in answer["parts"].items() if spent <= 0] == []
    assert sum(answer["parts"].values()) == pytest.approx(sum(answer["with_timers"]))
    while engine.client.has_unfinished_requests():
        step()
    assert [tokens[str(index)] for index in range(3)] == expected
    assert _own(engine) == before


def _own(engine: Any) -> list[Any]:
    """What the objects that a step goes through have of their own under the timed names."""
    from vllm_pyramid.compat.step_functions import step_functions

    return [vars(owner).get(name) for _, owner, name in step_functions(engine.client)]


@pytest.mark.engine
def test_what_cannot_be_profiled(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine.core
    runner = core.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as patch:
        patch.setattr(core, "async_scheduling", True)
        assert "set async_scheduling to false" in refusal(engine.client)
    with monkeypatch.context() as patch:
        patch.setattr(core, "model_executor", SimpleNamespace())
        assert "leave tensor and pipeline parallelism" in refusal(engine.client)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "device", SimpleNamespace(type="cuda"))
        assert "means nothing on" in refusal(engine.client)
    projection = runner.model.model.layers[1].mlp.down_proj
    with monkeypatch.context() as patch:
        patch.delattr(projection, "cpu_linear")
        assert "model.layers.1.mlp.down_proj multiplies" in refusal(engine.client)
    assert refusal(engine.client) == ""
