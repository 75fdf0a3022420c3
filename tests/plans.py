# SPDX-License-Identifier: Apache-2.0
"""Plans, as both sides of the engine make them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_pyramid.policy import Plan, Policy, RetentionPlan
from vllm_pyramid.request_config import RequestOverride, resolve


def plan_for(
    policy: Policy,
    override: RequestOverride | None,
    prompt_len: int,
    num_layers: int,
    block_size: int,
) -> Plan:
    """`Policy.plan` with the request's override."""
    chosen, budget = resolve(policy, override)
    return chosen.plan(prompt_len, num_layers, block_size, budget)


def plans_of(
    prompt_lens: npt.NDArray[np.int32], helds: npt.NDArray[np.int32], budget: int
) -> list[Plan]:
    """Plans that keep `helds`, `[L, E]`, of the prompts, without any rounding."""
    return [
        RetentionPlan.of(n, 1, budget, column, False)
        for n, column in zip(prompt_lens.tolist(), helds.T, strict=True)
    ]
