# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt: what is kept, what scorers see, what is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import Job, Start, greedy, random_prompts

pytestmark = pytest.mark.engine

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


def test_a_scorer_inside_gets_the_rotary_embedding(tiny: Start, tmp_path: Path) -> None:
    """Expected Attention at points, with SnapKV at the end: it undoes the rotation of queries."""
    from vllm_pyramid.methods.expected_attention import ExpectedAttentionScorer

    engine = tiny(
        "mistral",
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
