# SPDX-License-Identifier: Apache-2.0
"""What is kept of one prompt, in numbers. Plain Python and NumPy; imports nothing of this package.

`Budget` is what a user asks for; a `Plan` says what it comes to for one prompt: how many tokens
every layer keeps and gives back. Scheduler and workers make the same plans on their own.
"""

from vllm_pyramid.plan.budget import Budget
from vllm_pyramid.plan.deferred import DeferredPlan, Plan
from vllm_pyramid.plan.retention import Eviction, IntArray, Piece, RetentionPlan
from vllm_pyramid.plan.turns import with_turns

__all__ = [
    "Budget",
    "DeferredPlan",
    "Eviction",
    "IntArray",
    "Piece",
    "Plan",
    "RetentionPlan",
    "with_turns",
]
