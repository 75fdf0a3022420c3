# SPDX-License-Identifier: Apache-2.0
"""Policies that solve every prompt, beside everything else an engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import Engine, EnginePool, Job, Outcome, greedy, random_prompts
from tests.scheduler.checks import check_pool
from vllm_pyramid.policy.request import ALLOCATOR_KEY

pytestmark = pytest.mark.engine

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "kv_policy": "xkv",
    "kv_budget": "12%",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}
LENGTHS = [300, 9, 256, 700, 40, 511, 128, 1]


@pytest.fixture
def engine(engines: EnginePool, tiny_model: Callable[[str], Path]) -> Engine:
    return engines.get(tiny_model("llama-mha"), **SETTINGS)


def _solved(runs: list[Outcome]) -> list[list[int] | None]:
    return [run.report.get("solved_tokens") for run in runs]


def _check_report(run: Outcome, layers: int) -> None:
    """Budget conserved, every layer above the floor, blocks as the lengths say."""
    report, n = run.report, len(run.job.prompt)
    solved = report.get("solved_tokens")
    if solved is None:
        assert report["kept_tokens"] == [n] * layers and report["evicted_tokens"] == 0
        return
    assert sum(solved) == report["kv_budget"] * layers
    assert min(solved) >= 8 and max(solved) <= n
    skips = [(n - keep) // BLOCK * BLOCK for keep in solved]
    assert report["kept_tokens"] == [n - skip for skip in skips]
    assert report["evicted_tokens"] == sum(skips)
    assert report["blocks_after"] == sum(-(-(n - skip) // BLOCK) for skip in skips)


@pytest.mark.parametrize("policy", ["xkv", "zigzagkv"])
def test_lengths_and_tokens_do_not_depend_on_the_batch(
    engines: EnginePool, tiny_model: Callable[[str], Path], policy: str
) -> None:
    """Alone, all together in chunks, and arriving while others decode."""
    engine = engines.get(tiny_model("llama-mha"), **{**SETTINGS, "kv_policy": policy})
    prompts = random_prompts(LENGTHS, seed=4)
    together = engine.generate(prompts, greedy(12))
    alone = [engine.generate([prompt], greedy(12))[0] for prompt in prompts]
    staggered = engine.run(
        Job(prompt, greedy(12), arrival=2 * index) for index, prompt in enumerate(prompts)
    )
    for runs in (together, staggered):
        assert _solved(runs) == _solved(alone)
        assert [run.token_ids for run in runs] == [run.token_ids for run in alone]
    for run in together:
        _check_report(run, engine.num_layers)
    assert sum(solved is not None for solved in _solved(together)) >= 5
    if policy == "xkv":  # random prompts look alike to the others
        assert any(solved and len(set(solved)) > 1 for solved in _solved(together))
    engine.check_whole()


def test_requests_with_budgets_of_their_own(engine: Engine) -> None:
    prompt = random_prompts([400], seed=5)[0]
    asked: list[dict[str, Any]] = [
        {},
        {"kv_budget": 100},
        {"kv_budget": "50%"},
        {"kv_policy": "full"},
        {"kv_policy": "xkv", "kv_budget": 9},
        {"kv_budget": 4000},
    ]
    runs = engine.run([Job(prompt, greedy(8, **extra)) for extra in asked])
    assert [run.report["kv_budget"] for run in runs] == [48, 100, 200, 400, 9, 400]
    for run in runs:
        _check_report(run, engine.num_layers)
        assert run.token_ids[0] == runs[3].token_ids[0]
    assert [solved is None for solved in _solved(runs)] == [False, False, False, True, False, True]
    engine.check_whole()


def test_blocks_held_step_by_step(engine: Engine) -> None:
    """The whole prompt until it has been processed, then what was solved."""
    seen: dict[str, list[tuple[int, list[int]]]] = {}

    def record(engine: Engine) -> None:
        check_pool(engine.coordinator)
        for request in engine.scheduler.running:
            seen.setdefault(request.request_id, []).append(
                (request.num_computed_tokens, engine.coordinator.blocks_held(request.request_id))
            )

    jobs = [Job(prompt, greedy(20)) for prompt in random_prompts([640, 333, 160, 97, 3])]
    before = engine.coordinator.counters.tokens_evicted.copy()
    evicted = np.zeros(engine.num_layers, np.int64)
    for run in engine.run(jobs, record):
        n = len(run.job.prompt)
        skips = np.array([n - kept for kept in run.report["kept_tokens"]])
        evicted += skips
        assert skips.any() == (n >= 97)
        for computed, held in seen[run.request_id]:
            full = -(-computed // BLOCK)
            assert held == (full - (skips // BLOCK if computed > n else 0 * skips)).tolist()
    assert (engine.coordinator.counters.tokens_evicted - before).tolist() == evicted.tolist()
    engine.check_whole()


def test_aborts_at_any_moment(engine: Engine) -> None:
    prompts = random_prompts([700] * 7, seed=6)
    jobs = [
        Job(prompt, greedy(30), abort_after=steps)
        for prompt, steps in zip(prompts, [0, 2, 3, 4, 5, 20, None], strict=True)
    ]
    outcomes = engine.run(jobs, lambda engine: check_pool(engine.coordinator))
    assert [run.output is None for run in outcomes] == [True] * 6 + [False]
    _check_report(outcomes[-1], engine.num_layers)
    engine.check_whole()


def test_a_retention_for_every_prompt(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The total follows from the prompt; the budget, of the engine or a request, limits it."""
    engine = engines.get(
        tiny_model("llama-mha"),
        **{**SETTINGS, "kv_budget": None, "kv_policy_args": {"retention": 0.4}},
        kv_trace=str(tmp_path),
    )
    prompt = random_prompts([600], seed=7)[0]
    free, more, limited = engine.run(
        [Job(prompt, greedy(4, **extra)) for extra in ({}, {"kv_budget": "99%"}, {"kv_budget": 60})]
    )
    total = sum(free.report["solved_tokens"])
    assert free.report["solved_tokens"] == more.report["solved_tokens"]
    assert 60 * engine.num_layers < total < 500 * engine.num_layers
    assert free.report["kv_budget"] == -(-total // engine.num_layers)
    assert sum(limited.report["solved_tokens"]) == 60 * engine.num_layers
    for run in (free, limited):
        with np.load(tmp_path / f"{run.request_id}.npz") as trace:
            assert trace["held"].tolist() == run.report["kept_tokens"]
            assert int(trace["budget"]) == run.report["kv_budget"]
            for layer, held in enumerate(run.report["kept_tokens"]):
                assert trace[f"kept_{layer}"].shape == (4, held)
    engine.check_whole()


def test_a_sample_is_solved_and_the_rest_gets_its_average(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """Solved and averaged prompts in the same steps, two applications, shares from a client."""
    from vllm.exceptions import VLLMValidationError

    engine = engines.get(tiny_model("llama-mha"), **SETTINGS, kv_policy_args={"sample_first": 2})
    prompts = random_prompts([300, 400, 350, 500, 256], seed=8)
    first = engine.generate(prompts[:2], greedy(4))
    chosen = np.array([run.report["solved_tokens"] for run in first], float) - 8
    shares = (chosen / chosen.sum(axis=1, keepdims=True)).mean(axis=0)
    runs = engine.run(
        Job(prompt, greedy(8, **extra))
        for prompt, extra in zip(prompts[2:], [{}, {"kv_application": "b"}, {}], strict=True)
    )
    assert [run.report.get("averaged_over") for run in runs] == [2, None, 2]
    _check_report(runs[1], engine.num_layers)
    for run in (runs[0], runs[2]):
        n, budget = len(run.job.prompt), run.report["kv_budget"]
        for kept, share in zip(run.report["kept_tokens"], shares, strict=True):
            wanted = 8 + engine.num_layers * (budget - 8) * share
            assert kept in {n - (n - k) // BLOCK * BLOCK for k in (int(wanted), int(wanted) + 1)}
    theirs = {ALLOCATOR_KEY: {"kind": "shares", "shares": [1, 2, 3, 4]}}
    with pytest.raises(VLLMValidationError, match="cannot be set by requests"):
        engine.client.add_request("wrong", {"prompt_token_ids": prompts[0]}, greedy(4, **theirs))
    engine.check_whole()


def test_shares_of_another_model_are_refused_at_start_up(
    tiny_model: Callable[[str], Path], engines: EnginePool, tmp_path: Path
) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text(
        "budget: 64\nwindow: 8\nscorer: observation_window\n"
        "allocator: {kind: shares, shares: [1, 2, 3]}\n"
    )
    engines.close()
    with pytest.raises(ValueError, match="shares for 3 layers, but this model has 4"):
        engines.get(tiny_model("llama-mha"), **{**SETTINGS, "kv_policy": str(file)})
