# SPDX-License-Identifier: Apache-2.0
"""What to keep of a prompt's KV cache. Plain Python and NumPy; nothing here imports vLLM or torch.

`load_policy` turns a preset's name or a YAML file into a `Policy`; `Policy.plan` turns the length
of a prompt into a `RetentionPlan`: how many tokens every layer keeps and gives back. Where that
depends on the prompt's attention it is an `OpenPlan`, which the solved lengths settle.
"""

from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.budget import Budget
from vllm_pyramid.policy.plans import OpenPlan, Plan, RetentionPlan
from vllm_pyramid.policy.registry import load_policy, load_presets, policy_names

__all__ = [
    "Budget",
    "OpenPlan",
    "Plan",
    "Policy",
    "RetentionPlan",
    "load_policy",
    "load_presets",
    "policy_names",
]
