# SPDX-License-Identifier: Apache-2.0
"""Presses of kvpress in the engine keep what the same scorers of ours keep."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.engine.families import make_family
from tests.engine.support import greedy, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINE: dict[str, Any] = {
    "kv_policy": "snapkv",
    "kv_budget": 48,
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.mark.parametrize("hybrid", [False, True])
def test_presses_answer_as_our_scorers(engines, tiny_model, tmp_path, hybrid) -> None:
    """Where every layer evicts, and where most layers have a window (Gemma 3)."""
    try:
        importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("`make smollm2` installs kvpress")
    model = make_family("gemma3", tmp_path / "gemma3") if hybrid else tiny_model("llama-mha")
    prompts = random_prompts([300, 200, 333], seed=5)
    scorers: list[dict[str, Any]] = [
        {"kind": "observation_window", "kernel_size": 5},
        {"kind": "kvpress", "press": "SnapKVPress", "settings": {"window_size": 16}},
    ]
    answers = []
    for scorer in scorers:
        args = {"scorer": scorer, "window": 16, "sinks": 4, "min_tokens": 0}
        engine = engines.get(model, kv_policy_args=args, **ENGINE)
        runs = engine.generate(prompts, greedy(12))
        assert all(run.report["evicted_tokens"] > 0 for run in runs)
        answers.append([(run.token_ids, run.report["kept_tokens"]) for run in runs])
        engine.check_whole()
    assert answers[0] == answers[1]
