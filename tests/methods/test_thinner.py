# SPDX-License-Identifier: Apache-2.0
"""A step whose prompts are thinned: its shape in every layer, and what moves in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.steps import make_tracker, the_hooks
from vllm_pyramid.methods.thinning.worker import Thinner
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

pytestmark = pytest.mark.cpu

LAYERS, BLOCK, HEADS, GROUPS, SIZE = 5, 8, 4, 2, 16
ARGS: dict[str, Any] = {
    "piece_tokens": 48,
    "interval": 2,
    "decay_ratio": 0.4,
    "min_context": 8,
    "recent_ratio": 0.25,
    "sinks": 2,
}


def _make(policy: Policy, requests: int) -> tuple[EvictionTracker, Thinner]:
    tracker = make_tracker(policy, LAYERS, BLOCK, requests, heads=GROUPS)
    thinner: Thinner = the_hooks(tracker, Thinner)
    return tracker, thinner


def test_a_step_inside_a_piece_is_an_error() -> None:
    policy = load_policy("pyramidinfer", None, ARGS)
    tracker, _ = _make(policy, 1)
    tracker.add("0", 100, None)
    one = [np.array([value], np.int32) for value in (100, 0, 40)]
    with pytest.raises(RuntimeError, match="must be computed whole"):
        tracker.begin_step(["0"], *one)
    one[1][0] = 40
    with pytest.raises(RuntimeError, match="inside a piece"):
        tracker.begin_step(["0"], *one)
