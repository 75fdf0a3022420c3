# SPDX-License-Identifier: Apache-2.0
"""Heads with any lengths, for machines that count blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vllm_pyramid.methods.head_shares import HeadShares
from vllm_pyramid.plan import Budget, EvictionPoint, RetentionPlan
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.heads import Heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KIND, SHARES = f"{__name__}:AnyLengths", f"{__name__}:Shares"


class AnyLengths(Heads):
    """Keep everything, nothing or something in each lane, as its number and the prompt draw it."""

    splits: ClassVar[bool] = True
    kind: str = KIND

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> RetentionPlan:
        random = np.random.default_rng((prompt_len, num_lanes))
        keep = random.integers(1, prompt_len + 1, num_lanes)
        keep = np.where(random.random(num_lanes) < 0.3, prompt_len, keep)
        mean = -(-int(keep.sum()) // num_lanes)
        end = EvictionPoint.of(prompt_len, block_size, mean, keep, policy.fill_blocks)
        return RetentionPlan((end,))


class Shares(HeadShares):
    """Divide the budget by scores, in a machine whose model is made up and has another shape."""

    kind: str = SHARES  # type: ignore[assignment]

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        """Accept the configuration."""
