# SPDX-License-Identifier: Apache-2.0
"""Plans, as both sides of the engine make them, and what recency keeps by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import DeferredPlan, EvictionPoint, IntArray, Plan
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys

# `pyramidinfer` that thins small models: in pieces of 48 tokens each layer holds a step less.
THINS: dict[str, Any] = {
    "decay_curve": "linear",
    "decay_ratio": 0.0,
    "interval": 1,
    "piece_tokens": 48,
    "min_context": 4,
    "recent_ratio": 0.25,
}


def plan_for(
    policy: Policy, keys: RequestKeys, prompt_len: int, num_layers: int, block_size: int
) -> Plan:
    """`Policy.plan` with what the request asks for."""
    return resolve(policy, keys).plan(prompt_len, num_layers, block_size)


def plans_of(
    prompt_lens: npt.NDArray[np.int32], kept_lens: npt.NDArray[np.int32], budget: int
) -> list[EvictionPoint | DeferredPlan]:
    """Points that keep `kept_lens`, `[L, E]`, of the prompts, without any rounding."""
    return [
        EvictionPoint.of(n, 1, budget, column, False)
        for n, column in zip(prompt_lens.tolist(), kept_lens.T, strict=True)
    ]


def recent_positions(prompt_len: int, keep: int, front: int) -> IntArray:
    """The `keep` positions that recency keeps of a prompt, ascending: `front` first, rest last."""
    first = min(front, keep)
    kept = [*range(first), *range(prompt_len - keep + first, prompt_len)]
    return np.array(kept, np.int32)
