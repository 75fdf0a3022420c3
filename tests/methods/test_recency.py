# SPDX-License-Identifier: Apache-2.0
"""Which tokens recency keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.plans import recent_positions
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.selectors import TopKSelector
from vllm_pyramid.step.scorer_inputs import ScorerInputs

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("sinks", "keep", "positions"),
    [
        (0, 4, [6, 7, 8, 9]),
        (4, 7, [0, 1, 2, 3, 7, 8, 9]),
        (4, 10, list(range(10))),
    ],
)
def test_what_recency_keeps(sinks: int, keep: int, positions: list[int]) -> None:
    """By its scores and the rule of the selector, and the oracle of other tests says the same."""
    policy = load_policy("streaming-llm", None, {"sinks": sinks})
    view = ScorerInputs(
        num_tokens=10,
        window=policy.window,
        sinks=policy.sinks,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=8,
        first_kv_head=0,
        layer=0,
        num_layers=1,
        scale=1.0,
        soft_cap=0.0,
        queries=torch.zeros(1, 4, 8),
        key_cache=torch.zeros(1, 2, 16, 8),
        value_cache=torch.zeros(1, 2, 16, 8),
        block_row=torch.zeros(1, dtype=torch.int32),
    )
    scores = policy.scorer.score(view).clone()
    assert scores.shape == (2, 10) and scores.dtype == torch.float32
    scores[:, : policy.sinks] = torch.inf
    assert isinstance(policy.selector, TopKSelector)
    for head in policy.selector.select(scores, keep):
        assert sorted(head.tolist()) == positions
    result = recent_positions(10, keep, policy.sinks)
    assert result.dtype == np.int32
    assert result.tolist() == positions


def test_everything_is_recent() -> None:
    assert recent_positions(10, 10, 0).tolist() == list(range(10))
    assert recent_positions(10, 3, 4).tolist() == [0, 1, 2], "no more than there is room for"
