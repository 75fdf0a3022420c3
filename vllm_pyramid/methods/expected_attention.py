# SPDX-License-Identifier: Apache-2.0
"""Keep what future queries are expected to attend to (Expected Attention, arXiv:2510.00636)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


def check_queries(queries: int | None, policy: Policy) -> None:
    """Raise ValueError where a scorer looks at more queries than the window has."""
    if queries is not None and queries > policy.window:
        raise ValueError(
            f"policy {policy.name!r}: its scorer looks at {queries} queries, which the window of "
            f"{policy.window} does not have: set `window` to at least as many"
        )


class ExpectedAttentionScorer(Scorer):
    """Expected Attention: keep what queries that are still to come will attend to.

    Takes future queries as drawn from a normal distribution, whose mean m and covariance S are
    those of the window's queries without rotary embedding, rotated to the positions to come on
    average. The expected weight of key k is the softmax over the keys of
    `m k / sqrt(D) + k S k / (2 D)` (1 / sqrt(D) stands for the layer's scale). The score is its
    mean over the query heads of a group, plus `epsilon`, times `||v||`. The first tokens, which are
    kept, take no part in the softmax; learned sinks do.

    Follows arXiv:2510.00636, which takes the statistics of all the prompt's queries; here they are
    those of the last `window`, since a long prompt is computed in chunks.

    Attributes:
        queries: number of the window's last queries that count; None: all of them.
        future_positions: number of positions to come over which the rotation is averaged.
        covariance: whether S counts; otherwise the mean alone does.
        epsilon: added to the weight, so that V counts where the weight is next to nothing.
    """

    needs_queries: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["expected_attention"] = "expected_attention"
    queries: int | None = Field(default=None, ge=1)
    future_positions: int = Field(default=512, ge=1)
    covariance: bool = True
    epsilon: float = Field(default=0.0, ge=0.0)

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_queries(self.queries, policy)

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 3 * head_size + 2 * (self.queries or policy.window) + 4 * group + 16

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch.nn.functional as F

        queries = inputs.unrotated_queries(self.queries).transpose(0, 1)  # [H, W, D]
        mean = queries.mean(dim=1)
        spread = (queries - mean[:, None]) / len(queries[0]) ** 0.5
        mean, spread = (
            inputs.at_future_positions(x, self.future_positions).unflatten(
                0, (inputs.num_kv_heads, inputs.group)
            )
            for x in (mean, spread)
        )
        keys, weights = inputs.keys[:, inputs.sinks :], 0.0
        for head in range(inputs.group):  # `[G, T]` at a time
            logits = (keys @ mean[:, head, :, None])[..., 0] * inputs.scale
            if self.covariance:  # k S k is the sum of the squares of k times each deviation
                squares = (keys @ spread[:, head].transpose(1, 2)).square().sum(dim=-1)
                logits += squares * (inputs.scale**2 / 2)
            total = logits.logsumexp(dim=-1)
            if inputs.logit_sinks is not None:  # of a query head of each KV head
                own = inputs.logit_sinks.unflatten(0, (-1, inputs.group))[:, head]
                total = total.logaddexp(own.to(total.dtype))
            weights = weights + (logits - total[:, None]).exp() / inputs.group
        scores = (weights + self.epsilon) * inputs.values[:, inputs.sinks :].norm(dim=-1)
        return F.pad(scores, (inputs.sinks, 0))
