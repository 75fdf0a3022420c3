# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt: what is kept, what scorers see, what is shared."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.support import greedy, random_prompts
from vllm_pyramid.methods.expected_attention import ExpectedAttentionScorer


def test_a_scorer_inside_gets_the_rotary_embedding(tiny, monkeypatch) -> None:
    """Expected Attention at points, with SnapKV at the end: it undoes the rotation of queries."""
    chunk = {"tokens": 64, "keep": 48, "scorer": "expected_attention"}
    own = {"kv_policy": "snapkv", "kv_budget": 40, "kv_policy_args": {"chunk": chunk}}
    engine = tiny("mistral", **own, dtype="float32", max_model_len=1024, max_num_seqs=8)
    seen, score = [], ExpectedAttentionScorer.score

    def watched(self: Any, view: Any) -> torch.Tensor:
        seen.append((view.rotary is not None, view.whole, view.last_position + 1))
        return score(self, view)

    monkeypatch.setattr(ExpectedAttentionScorer, "score", watched)
    engine.generate(random_prompts([300], seed=5), greedy(12))
    assert {point for _, _, point in seen} == {64, 128, 192, 256}
    assert all(rotary and whole == (point == 64) for rotary, whole, point in seen)
