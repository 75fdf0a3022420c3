# SPDX-License-Identifier: Apache-2.0
"""Requests beside sleep mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.beside import BUDGET, SETTINGS, WHOLE, WINDOW
from tests.engine.support import Engine, EnginePool, Job, greedy, random_prompts

pytestmark = pytest.mark.engine

HEADS = {"mask": [[1, 0], [0, 1], [0, 0], [1, 1]], "share": 0.5, "heads.sinks": 4}
HEADS |= {"heads.recent": 40, "heads.recent_share": 0.0}


@pytest.mark.parametrize(
    ("policy", "args", "budget", "asynchronous"),
    [
        ("snapkv", {"window": WINDOW}, BUDGET, True),
        ("h2o", {"interval": 16}, BUDGET, False),
        ("razorattention", HEADS, None, True),
    ],
)
def test_requests_outlive_sleep(
    engines: EnginePool,
    tiny_model: Callable[[str], Path],
    policy: str,
    args: dict[str, Any],
    budget: int | None,
    asynchronous: bool,
) -> None:
    """`sleep(1, mode="keep")` drops the cache under running requests: all is computed again.

    A CPU worker keeps its memory, so it is filled with what was never there.
    """
    engine = engines.get(
        tiny_model("mistral"),
        **{**SETTINGS, "kv_policy": policy, "kv_policy_args": args, "kv_budget": budget},
        async_scheduling=asynchronous,
    )
    worker = engine.core.model_executor.driver_worker.worker
    prompts = random_prompts([230, 150, 30, 90])

    def serve(on_step: Callable[[Engine], None] | None) -> list[list[int]]:
        jobs = [Job(prompt, greedy(40, **extra)) for extra in ({}, WHOLE) for prompt in prompts]
        outcomes = engine.run(jobs, on_step)
        engine.check_whole()
        return [outcome.token_ids for outcome in outcomes]

    steps = itertools.count(1)
    slept = []

    def sleep(engine: Engine) -> None:
        if next(steps) not in (3, 14, 15, 30):  # in prompts, and behind them
            return
        engine.core.sleep(1, mode="keep")
        for cache in worker.model_runner.kv_caches:
            cache.fill_(torch.nan)
        for hooks in worker.model_runner.pyramid.tracker.hooks:
            if (pages := getattr(hooks, "pages", None)) is not None:
                pages.fill_(torch.nan)
        slept.append(len(engine.scheduler.waiting))
        assert not engine.coordinator.counters.held_blocks.any()
        engine.core.wake_up()

    expected = serve(None)
    assert engine.llm.reset_prefix_cache()
    assert serve(sleep) == expected
    assert len(slept) == 4 and min(slept) >= 4
