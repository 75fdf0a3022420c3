# SPDX-License-Identifier: Apache-2.0
"""The plan of a request, as both sides of the engine make it."""

from __future__ import annotations

from vllm_pyramid.config import RequestOverride, resolve
from vllm_pyramid.policy import Policy, RetentionPlan


def plan_for(
    policy: Policy,
    override: RequestOverride | None,
    prompt_len: int,
    num_layers: int,
    block_size: int,
) -> RetentionPlan:
    """`Policy.plan` with the request's override."""
    chosen, budget = resolve(policy, override)
    return chosen.plan(prompt_len, num_layers, block_size, budget)
