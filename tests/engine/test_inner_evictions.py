# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt: what is kept, what is held, and that the pool may be small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.bench import small_pool
from tests.engine.support import Engine, EnginePool, Job, greedy, random_prompts
from vllm_pyramid.policy.planning import peak_blocks_up_to

pytestmark = pytest.mark.engine

BLOCK = 16
MAX_TOKENS = 12


def _settings(policy: str = "snapkv", **changes: Any) -> dict[str, Any]:
    args = {"chunk.tokens": 64, "chunk.keep": 48, "chunk.scorer": None}
    return {
        "kv_policy": policy,
        "kv_budget": 40,
        "kv_policy_args": {**args, **({"schedule": "prompt_end"} if policy == "h2o" else {})},
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        **changes,
    }


def _jobs(lengths: list[int], seed: int = 5) -> list[Job]:
    return [Job(p, greedy(MAX_TOKENS), i) for i, p in enumerate(random_prompts(lengths, seed=seed))]


def test_points_behind_the_prompt_change_nothing(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """E of at least the prompt: the tokens, reports and traces of the policy without it."""
    found = []
    for tokens in (0, 512):
        folder = tmp_path / str(tokens)
        engine = engines.get(
            tiny_model("mistral"),
            kv_policy="pyramidkv",
            kv_budget=40,
            kv_policy_args={"chunk": {"tokens": tokens}},
            kv_trace=str(folder),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=50,
            max_num_seqs=8,
        )
        outcomes = engine.run(_jobs([130, 401, 515]))
        kept = []
        for outcome in outcomes:
            assert outcome.report.pop("inner_evictions", 0) == 0
            (path,) = folder.glob(f"{outcome.request_id}*.npz")
            with np.load(path) as file:
                arrays = {name: file[name].tolist() for name in file if name != "request_id"}
            kept.append((outcome.token_ids, outcome.report, arrays))
        found.append(kept)
    assert repr(found[0]) == repr(found[1])


# One that takes ten times the pool, a short one, one whose peak is the pool.
LONG = [5000, 100, 700]


@pytest.mark.parametrize(("name", "asynchronous"), [("snapkv", True), ("h2o", False)])
def test_a_prompt_of_ten_pools(
    engines: EnginePool, tiny_model: Callable[[str], Path], name: str, asynchronous: bool
) -> None:
    """The pool is exactly what one prompt holds at most; the answers are those of a large one."""
    layers = 4
    settings = _settings(
        name,
        max_model_len=6000,
        hf_overrides={"max_position_embeddings": 6000},
        max_num_batched_tokens=100,
        async_scheduling=asynchronous,
    )
    engine = engines.get(
        tiny_model("mistral"), **settings, num_gpu_blocks_override=layers * 6000 // BLOCK + 1
    )
    peak = int(peak_blocks_up_to(engine.scheduler.pyramid.policy, 6000, layers, BLOCK).sum())
    assert peak * BLOCK <= layers * (64 + 48 + 3 * BLOCK)
    most = 0

    def look(engine: Engine) -> None:
        nonlocal most
        for request in engine.scheduler.running:
            most = max(most, sum(engine.coordinator.blocks_held(request.request_id)))

    expected = engine.run(_jobs(LONG))
    with small_pool(engine, peak):
        found = engine.run(_jobs(LONG), look, max_steps=2000)
        engine.check_whole()
    assert [(one.token_ids, one.report) for one in found] == [
        (one.token_ids, one.report) for one in expected
    ]
    assert peak - 2 * layers <= most <= peak
    assert [one.report["inner_evictions"] > 3 for one in found] == [True, False, True]


def test_a_scorer_inside_gets_the_rotary_embedding(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Expected Attention at points, with SnapKV at the end: it undoes the rotation of queries."""
    from vllm_pyramid.methods.expected_attention import ExpectedAttentionScorer

    engine = engines.get(
        tiny_model("mistral"),
        **_settings(
            kv_policy_args={
                "chunk.tokens": 64,
                "chunk.keep": 48,
                "chunk.scorer": "expected_attention",
            }
        ),
    )
    seen, score = [], ExpectedAttentionScorer.score

    def watched(self: Any, view: Any) -> torch.Tensor:
        seen.append((view.rotary is not None, view.whole, view.last_position + 1))
        return score(self, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpectedAttentionScorer, "score", watched)
        engine.run(_jobs([300]))
    assert seen and all(rotary for rotary, _, _ in seen)
    assert {point for _, _, point in seen} == {64, 128, 192, 256}
    assert all(whole == (point == 64) for _, whole, point in seen)


def test_prefixes_are_shared_up_to_the_first_point(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """The first eviction is at 64 tokens, whose last ones, the window, are computed in any case.

    A larger budget's is later, and finds what the others left: all of theirs.
    """
    engine = engines.get(tiny_model("mistral"), **_settings(max_num_batched_tokens=100))
    first, other = random_prompts([400, 400], seed=21)
    prompts = [first, first, [*first[:250], *other], [*first[:50], *other]]
    jobs = [*(Job(prompt, greedy(2)) for prompt in prompts), Job(first, greedy(2, kv_budget=64))]
    cached = [engine.run([job])[0].cached for job in jobs]
    assert cached == [0, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK, 4 * BLOCK]
    engine.check_whole()
