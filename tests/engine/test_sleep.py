# SPDX-License-Identifier: Apache-2.0
"""Requests beside sleep mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.beside import BUDGET, SETTINGS, WHOLE, WINDOW
from tests.engine.models import write_model
from tests.engine.support import Engine, EnginePool, Job, Outcome, greedy, random_prompts

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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_of_old_weights_is_found(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path, asynchronous: bool
) -> None:
    """Not in the cache, in host memory, in files, nor by requests that run meanwhile."""
    model, folder = tiny_model("mistral"), tmp_path / "kv"
    other = write_model("mistral", tmp_path / "other")
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    settings = {"kv_policy": "snapkv", "kv_policy_args": {"window": WINDOW}, "kv_budget": BUDGET}
    settings |= {"async_scheduling": asynchronous, "kv_host_cache": 0.0625}
    settings |= {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    engine = engines.get(model, **settings, dtype="float32", kv_host_cache_dir=str(folder))
    prompts, later = random_prompts([500, 300]), random_prompts([700], seed=1)

    def serve(
        prompts: list[list[int]], on_step: Callable[[Engine], None] | None = None
    ) -> list[Outcome]:
        return engine.run([Job(prompt, greedy(20)) for prompt in prompts], on_step)

    def tokens(outcomes: list[Outcome]) -> list[list[int]]:
        return [outcome.token_ids for outcome in outcomes]

    def reload(path: Path) -> None:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})

    old = serve(prompts)
    assert all(outcome.cached for outcome in serve(prompts))
    steps = itertools.count(1)
    meanwhile = serve(later, lambda _: reload(other) if next(steps) == 1 else None)
    new = serve(prompts)
    assert [outcome.cached for outcome in (*meanwhile, *new)] == [0, 0, 0]
    assert not list(folder.rglob("*.kv")), "files name the weights of the start"
    assert engine.llm.reset_prefix_cache()
    assert tokens(serve([*prompts, *later])) == tokens([*new, *meanwhile]) and tokens(new) != (
        tokens(old)
    )
    reload(model)
    back = serve(prompts)
    assert [outcome.cached for outcome in back] == [0, 0] and tokens(back) == tokens(old)
    engine.check_whole()
