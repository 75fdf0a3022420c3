# SPDX-License-Identifier: Apache-2.0
"""Policies that solve every prompt, beside everything else an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import Job, Outcome, Start, greedy, random_prompts
from vllm_pyramid.policy.request import ALLOCATOR_KEY

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "kv_policy": "xkv",
    "kv_budget": "12%",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}


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


def test_a_retention_for_every_prompt(tiny: Start, tmp_path: Path) -> None:
    """The total follows from the prompt; the budget, of the engine or a request, limits it."""
    engine = tiny(
        "llama-mha",
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


def test_a_sample_is_solved_and_the_rest_gets_its_average(tiny: Start) -> None:
    """Solved and averaged prompts in the same steps, two applications, shares from a client."""
    from vllm.exceptions import VLLMValidationError

    engine = tiny("llama-mha", **SETTINGS, kv_policy_args={"sample_first": 2})
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
