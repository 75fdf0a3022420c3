# SPDX-License-Identifier: Apache-2.0
"""What the prompt's end attends to, and what future queries are expected to: both in one score."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.expected_attention import ExpectedAttentionScorer
from vllm_pyramid.methods.observation_window import odd
from vllm_pyramid.methods.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.view import LayerView

# Queries whose attention is in memory at once.
_AT_ONCE = 8


class ObservedExpectedScorer(Scorer):
    """SnapKV's attention times the size of V, pooled widely, plus Expected Attention.

    The first part is what the window's queries attend to (SnapKV, arXiv:2404.14469), weighed by the
    L1 norm of V (VATP, arXiv:2406.12335), then pooled so wide that an answer of several tokens
    stays together. It finds what the question is about. The second is what queries to come are
    expected to attend to (arXiv:2510.00636): it keeps what any continuation needs. Each is divided
    by its sum over the head's tokens. This combination is ours; docs/quality.md compares it.

    Attributes:
        kernel_size: width of the pooling of the first part in tokens, odd.
        expected: weight of the second part beside the first.
        future_positions: see `ExpectedAttentionScorer`.
    """

    needs_queries: ClassVar[bool] = True
    needs_positions: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    kind: Literal["observed_expected"] = "observed_expected"
    kernel_size: int = Field(default=21, ge=1, le=1023)
    expected: float = Field(default=1.0, ge=0.0)
    future_positions: int = Field(default=512, ge=1)

    _odd = odd("kernel_size")

    def score(self, view: LayerView) -> torch.Tensor:
        """See the base."""
        import torch
        import torch.nn.functional as F

        inside = slice(view.sinks, view.num_tokens - view.window)
        last = len(view.queries)
        observed = torch.zeros(view.num_kv_heads, view.num_tokens, device=view.queries.device)
        for first in range(last - view.window, last, _AT_ONCE):
            logits = view.logits_of(slice(first, min(first + _AT_ONCE, last)))
            observed += view.reduce_groups(logits.softmax(dim=-1).sum(dim=1))
        weighed = observed * view.values.norm(p=1, dim=-1)
        half = self.kernel_size // 2
        pooled = F.avg_pool1d(weighed[:, : inside.stop], self.kernel_size, stride=1, padding=half)
        scores = _shares(pooled[:, inside])
        if self.expected:
            expected = ExpectedAttentionScorer(future_positions=self.future_positions)
            scores = scores + self.expected * _shares(expected.score(view)[:, inside])
        return F.pad(scores, (view.sinks, view.window))


def _shares(scores: torch.Tensor) -> torch.Tensor:
    """`[G, n]` as shares of each head's sum."""
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=1e-30)
