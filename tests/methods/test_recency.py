# SPDX-License-Identifier: Apache-2.0
"""Which tokens recency keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.methods.views import MadeUp
from tests.plans import recent_positions
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.selectors import TopKSelector


@pytest.mark.parametrize(
    ("sinks", "keep", "positions"),
    [(0, 4, [6, 7, 8, 9]), (4, 7, [0, 1, 2, 3, 7, 8, 9]), (4, 10, list(range(10)))],
)
def test_what_recency_keeps(sinks: int, keep: int, positions: list[int]) -> None:
    """By its scores and the rule of the selector, and the oracle of other tests says the same."""
    policy = load_policy("streaming-llm", None, {"sinks": sinks})
    scores = policy.scorer.score(MadeUp(tokens=10).view(policy.window, sinks)).clone()
    assert scores.shape == (2, 10) and scores.dtype == torch.float32
    scores[:, : policy.sinks] = torch.inf
    assert isinstance(policy.selector, TopKSelector)
    for head in policy.selector.select(scores, keep):
        assert sorted(head.tolist()) == positions
    result = recent_positions(10, keep, policy.sinks)
    assert result.dtype == np.int32
    assert result.tolist() == positions
