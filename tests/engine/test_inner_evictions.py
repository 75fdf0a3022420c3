# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt: what is kept, what scorers see, what is shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.support import EnginePool, Job, greedy, random_prompts

pytestmark = pytest.mark.engine

BLOCK = 16
MAX_TOKENS = 12


def _settings(**changes: Any) -> dict[str, Any]:
    return {
        "kv_policy": "snapkv",
        "kv_budget": 40,
        "kv_policy_args": {"chunk.tokens": 64, "chunk.keep": 48, "chunk.scorer": None},
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
