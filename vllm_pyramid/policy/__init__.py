# SPDX-License-Identifier: Apache-2.0
"""What to keep of a prompt's KV cache: presets, files and changes to them, checked once."""

from vllm_pyramid.plan import Budget, DeferredPlan, Plan, RetentionPlan
from vllm_pyramid.policy.policy import DEFAULT_MIN_TOKENS, Policy
from vllm_pyramid.policy.presets import AUTO, RECOMMENDED, load_policy, load_presets, policy_names

__all__ = [
    "AUTO",
    "DEFAULT_MIN_TOKENS",
    "RECOMMENDED",
    "Budget",
    "DeferredPlan",
    "Plan",
    "Policy",
    "RetentionPlan",
    "load_policy",
    "load_presets",
    "policy_names",
]
