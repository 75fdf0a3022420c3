# SPDX-License-Identifier: Apache-2.0
"""Keep what queries at the positions to come attend to (DapQ, arXiv:2603.11564)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.expected_attention import check_queries
from vllm_pyramid.methods.observation_window import odd
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

# Queries whose attention is in memory at once.
_AT_ONCE = 8


class FutureAttentionScorer(Scorer):
    """DapQ: keep what made-up queries at the answer's positions attend to.

    N pseudo queries stand at the N positions behind the prompt. The score of a key is the mean of
    their attention to it over the prompt's keys, and over the query heads of a group.

    After arXiv:2603.11564, whose finding is that a query's position decides more than its content.
    The paper appends N made-up tokens to the prompt, and computes their queries with it. Here a
    pseudo query has the content of one of the prompt's last N queries, turned to its position, so
    nothing is computed again; and the last N tokens stay in any case, being in the window.

    Attributes:
        queries: N, at most the policy's window.
        kernel_size: width of a pooling along the positions, odd; 1, none, is the paper's.
    """

    needs_queries: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    attention_mass: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["future_attention"] = "future_attention"
    queries: int = Field(default=32, ge=1)
    kernel_size: int = Field(default=1, ge=1, le=1023)

    _odd = odd("kernel_size")

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_queries(self.queries, policy)

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 2 * head_size + 3 * _AT_ONCE * (group + 1) + 16

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        total = torch.zeros(inputs.num_kv_heads, inputs.num_tokens, device=inputs.queries.device)
        for some in inputs.future_queries(self.queries).split(_AT_ONCE):
            total += inputs.reduce_groups(inputs.attention_with(some).sum(dim=1))
        half = self.kernel_size // 2
        return F.avg_pool1d(total / self.queries, self.kernel_size, stride=1, padding=half)
