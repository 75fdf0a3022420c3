# SPDX-License-Identifier: Apache-2.0
"""What each layer keeps of one request, and when. Plain integers; imports nothing of this package.

    Policy.plan(prompt_len, ...) ---> RetentionPlan                  lengths known beforehand
                                 \\-> DeferredPlan --resolve(keep)--> RetentionPlan

A `Budget` is what a user asks for. A `RetentionPlan` is a tuple of `EvictionPoint`: how many tokens
every layer keeps and gives back at each eviction. A `DeferredPlan` bounds lengths that are decided
from the prompt's scores. The scheduler and the workers make equal plans by themselves and ask both
types the same questions: `evicts`, `evictions_by`, `next_eviction`, `after`, `skip_after`,
`piece_at`, `resolved`. `plan.bounds` derives how many blocks a request can hold.
"""

from vllm_pyramid.plan.bounds import (
    least_given_back,
    overwritten_blocks,
    peak_blocks,
    tokens_per_step,
)
from vllm_pyramid.plan.budget import Budget
from vllm_pyramid.plan.deferred import DeferredPlan, Plan
from vllm_pyramid.plan.eviction_point import (
    Eviction,
    EvictionPoint,
    IntArray,
    Piece,
    PlanMismatchError,
)
from vllm_pyramid.plan.levels import LateEviction, LevelPlan, Order
from vllm_pyramid.plan.retention import RetentionPlan
from vllm_pyramid.plan.turns import affordable, with_turns

__all__ = [
    "Budget",
    "DeferredPlan",
    "Eviction",
    "EvictionPoint",
    "IntArray",
    "LateEviction",
    "LevelPlan",
    "Order",
    "Piece",
    "Plan",
    "PlanMismatchError",
    "RetentionPlan",
    "affordable",
    "least_given_back",
    "overwritten_blocks",
    "peak_blocks",
    "tokens_per_step",
    "with_turns",
]
