# SPDX-License-Identifier: Apache-2.0
"""Prefix caching with two pipeline stages: tokens as without it, hits as long as with one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import Job, Start, random_prompts
from tests.engine.support import greedy as greedy_params
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = 16 << 10  # bytes of a block of one layer
BLOCK, WINDOW, BLOCKS = 16, 8, 120
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
}
# Lower layers keep more, so the stages have different blocks to spare.
POLICY: dict[str, Any] = {
    "kv_policy": "pyramidkv",
    "kv_budget": 64,
    "kv_min_tokens": 0,
    "kv_policy_args": {"window": WINDOW},
    "kv_admission": "prompt",
}


def _all_but_window(tokens: int) -> int:
    return (tokens - WINDOW) // BLOCK * BLOCK


def test_two_stages_share_prefixes(tiny: Start, tiny_model: Any, tmp_path: Path) -> None:
    first, other, *crowd = random_prompts([300, 100, 200, 200, 200, 200, 200])
    # Tokens, how many more, salt, and what is found.
    alone: list[tuple[list[int], int, str | None, int]] = [
        (first, 24, None, 0),
        (first, 24, None, _all_but_window(300)),
        ([*first[:200], *other], 24, None, 192),
        (first, 24, "salt", 0),
        (first, 24, "salt", _all_but_window(300)),
        ([*first, *other], 24, None, 288),
        (first[:200], 24, None, _all_but_window(200)),
    ]
    waves: list[Any] = []
    for tokens, count, salt, _ in alone:
        waves += [[[tokens, greedy(count), *([salt] if salt else [])]], []]
    # More than the pools hold to their ends: they are preempted, and find each other's blocks gone.
    waves += [[[tokens, greedy(160)] for tokens in crowd]]
    waves += [[], [[crowd[-1], greedy(24)]]]
    waves += [[], [[first, greedy(24)]]]  # which the crowd has pushed out
    waves += [[], [[[*first, *other], greedy(24, kv_turns=[300])]]]  # no turn resumes here
    child = Child(
        tmp_path / "child",
        (
            {
                "model": str(tiny_model("llama-mha")),
                **SETTINGS,
                "kv_cache_memory_bytes": BLOCKS * PAGE,
                "pipeline_parallel_size": 2,
                "distributed_executor_backend": "mp",
                "additional_config": {**POLICY, "kv_host_cache": 0.03125},
            },
            waves,
        ),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    try:
        engine = tiny(
            "llama-mha",
            **SETTINGS,
            **POLICY,
            kv_cache_memory_bytes=4 * BLOCKS * PAGE,
            enable_prefix_caching=False,
        )
        outcomes = [
            engine.run([Job(tokens, greedy_params(count))])[0] for tokens, count, _, _ in alone
        ]
        outcomes += engine.run([Job(tokens, greedy_params(160)) for tokens in crowd])
        outcomes += engine.run([Job(crowd[-1], greedy_params(24))])
        outcomes.append(outcomes[0])
        (result,) = child.results(560)
    finally:
        child.kill()
    assert result["prefix_caching"]
    turn = result["outputs"].pop()
    assert turn["token_ids"] == outcomes[5].token_ids
    assert turn["report"]["kv_turn_mode"] == "exact"
    assert "each pipeline stage has a block pool" in turn["report"]["resumed"]["because"]
    for output, outcome in zip(result["outputs"], outcomes, strict=True):
        assert output["token_ids"] == outcome.token_ids
        assert output["report"] == outcome.report
    cached = [output["cached"] for output in result["outputs"]]
    assert cached[: len(alone)] == [found for _, _, _, found in alone]
    assert not any(cached[len(alone) : -2]), "prompts of their own"
    assert cached[-1] == _all_but_window(300)
    assert result["evictions"] > len(alone) + len(crowd) + 2, "no request was preempted"
    assert result["free_blocks"] == [BLOCKS - 1] * 2
