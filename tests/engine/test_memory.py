# SPDX-License-Identifier: Apache-2.0
"""Blocks really come back, and as many more requests fit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import Engine, EnginePool, Job, greedy, random_prompts
from tests.scheduler.checks import check_pool

pytestmark = pytest.mark.engine

BLOCK = 16


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@pytest.mark.parametrize("fill_blocks", [True, False])
def test_blocks_held_after_prefill(
    engines: EnginePool, tiny_model: Callable[[str], Path], fill_blocks: bool
) -> None:
    """Step by step: the whole prompt until it has been processed, then ceil((n - skip_l) / 16)."""
    engine = engines.get(
        tiny_model("llama-mha"),
        kv_policy="pyramidkv",
        kv_budget=64,
        kv_policy_args={"fill_blocks": fill_blocks},
        dtype="float32",
        max_num_batched_tokens=200,
    )
    seen: dict[str, list[tuple[int, list[int]]]] = {}

    def record(engine: Engine) -> None:
        check_pool(engine.coordinator)
        for request in engine.scheduler.running:
            seen.setdefault(request.request_id, []).append(
                (request.num_computed_tokens, engine.coordinator.blocks_held(request.request_id))
            )

    lengths = [640, 333, 160, 97, 70, 40, 3]
    jobs = [Job(prompt, greedy(20)) for prompt in random_prompts(lengths)]
    for outcome in engine.run(jobs, record):
        n = len(outcome.job.prompt)
        skips = [n - kept for kept in outcome.report["kept_tokens"]]
        assert (max(skips) > 0) == (n > 64 + (BLOCK if fill_blocks else 0)), (n, skips)
        after_prefill = 0
        for computed, held in seen[outcome.request_id]:
            if computed <= n:  # the step that ends the prompt still holds all of it
                assert held == [_blocks(computed)] * engine.num_layers
            else:
                after_prefill += 1
                assert held == [_blocks(computed) - skip // BLOCK for skip in skips]
        assert after_prefill > 10
        assert outcome.report["blocks_before"] == _blocks(n) * engine.num_layers
        assert outcome.report["blocks_after"] == sum(_blocks(n) - skip // BLOCK for skip in skips)
        if fill_blocks:
            assert outcome.report["blocks_after"] == sum(_blocks(n - skip) for skip in skips)
    engine.check_whole()


# More fits ----------------------------------------------------------------------------------------

PROMPT_LEN = 2048
MAX_TOKENS = 96


def running_in_steady_state(engine: Engine, num_requests: int) -> float:
    """Median number of requests that decode at once while more wait, from the second wave on."""
    counts: list[int] = []
    finished = 0

    def count(engine: Engine) -> None:
        nonlocal finished
        finished = num_requests - engine.client.get_num_unfinished_requests()
        if engine.scheduler.waiting and finished >= 8:
            counts.append(
                sum(r.num_computed_tokens >= r.num_prompt_tokens for r in engine.scheduler.running)
            )

    jobs = [
        Job(prompt, greedy(MAX_TOKENS)) for prompt in random_prompts([PROMPT_LEN] * num_requests)
    ]
    engine.run(jobs, count)
    engine.check_whole()
    assert len(counts) > 20
    return statistics.median(counts)


def test_five_times_as_many_requests_run_at_once(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """In a pool of eight full prompts, `pyramidkv` at 12 % decodes five times as many as `full`."""
    layers = 4
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": PROMPT_LEN + 128,
        "max_num_seqs": 128,
        "max_num_batched_tokens": PROMPT_LEN + 128,
        "num_gpu_blocks_override": 8 * _blocks(PROMPT_LEN) * layers + 1,
    }
    model = tiny_model("llama-thin")
    full = running_in_steady_state(engines.get(model, kv_policy="full", **settings), 32)
    evicting = running_in_steady_state(
        engines.get(model, kv_policy="pyramidkv", kv_budget="12%", **settings), 160
    )
    print(f"requests decoding at once, median: full {full}, pyramidkv {evicting}")
    assert evicting >= 5 * full
    assert full >= 5  # `full` filled the pool too: the comparison is fair
