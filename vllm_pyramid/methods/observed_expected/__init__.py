# SPDX-License-Identifier: Apache-2.0
"""What the prompt's end attends to, and what future queries are expected to: both in one score.

It costs the attention of `queries` queries and their products with all keys. Kernels score all
requests of a step together; `score` defines the result, one request at a time. The scorer needs the
window's queries without rotary embedding, and is refused for models whose embedding is not known.
`expected` was 1 up to version 0.2.0. Why it is 0.25 now, and what hybrids with few full layers may
set: lab/results/real-models.md#what-the-recommended-scorer-is-made-of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.expected_attention import ExpectedAttentionScorer, check_queries
from vllm_pyramid.methods.observation_window import odd
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

# Queries whose attention is in memory at once.
_AT_ONCE = 8


class ObservedExpectedScorer(Scorer):
    """Keep what the question attends to, and what any continuation is expected to attend to.

    Adds two scores, each divided by its sum over the head's tokens. The first is the attention of
    the last `queries` (SnapKV, arXiv:2404.14469), weighed by the L1 norm of V (VATP,
    arXiv:2406.12335) and pooled so wide that an answer of several tokens stays together. The second
    is Expected Attention (arXiv:2510.00636). The policy's window may be longer than `queries`: it
    keeps a whole question, of which the end looks at the text. The combination is ours;
    docs/quality.md compares it.

    Attributes:
        queries: number of the window's last queries whose attention and statistics count.
        kernel_size: width of the pooling of the first score in tokens, odd.
        expected: weight of the second score; the first has 1.
        future_positions: number of positions to come over which the second score averages.
    """

    needs_queries: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    joins_layers: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["observed_expected"] = "observed_expected"
    queries: int = Field(default=16, ge=1)
    kernel_size: int = Field(default=21, ge=1, le=1023)
    expected: float = Field(default=0.25, ge=0.0)
    future_positions: int = Field(default=512, ge=1)

    _odd = odd("kernel_size")

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_queries(self.queries, policy)

    def queries_at_step_end(self, policy: Policy) -> int:
        return self.queries

    def kernel_bytes(self, policy: Policy, head_size: int, group: int) -> tuple[int, int]:
        """Return what Triton's launchers allocate; C++ keeps less.

        For each score: the second one, its logits and sums, and the statistics of 512 keys. For
        each request and query head: the queries to come, the log-sum-exps, and the last keys'
        statistics.
        """
        rows = self.queries + 1 if self.expected else self.queries
        of_score = -(-8 * group * rows // 512) + 1
        of_head = 12 * rows + 12
        if self.expected:
            of_score += 4 + 4 * group
            of_head += 4 * self.queries * head_size
        return of_score, of_head

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        inside = slice(inputs.sinks, inputs.num_tokens - inputs.window)
        last = len(inputs.queries)
        observed = torch.zeros(inputs.num_kv_heads, inputs.num_tokens, device=inputs.queries.device)
        for first in range(last - self.queries, last, _AT_ONCE):
            weights = inputs.attention_of(slice(first, min(first + _AT_ONCE, last)))
            observed += inputs.reduce_groups(weights.sum(dim=1))
        weighed = observed * inputs.values.norm(p=1, dim=-1)
        half = self.kernel_size // 2
        pooled = F.avg_pool1d(weighed[:, : inside.stop], self.kernel_size, stride=1, padding=half)
        scores = _shares(pooled[:, inside])
        if self.expected:
            expected = ExpectedAttentionScorer(
                queries=self.queries, future_positions=self.future_positions
            )
            scores = scores + self.expected * _shares(expected.score(inputs)[:, inside])
        return F.pad(scores, (inputs.sinks, inputs.window))

    def scores(self, batch: EvictionBatch) -> torch.Tensor:
        """Return the scores by kernels; ValueError: a request has too few queries in the step."""
        import numpy as np

        from vllm_pyramid.methods.observed_expected.kernels import ScoreShape, observed_expected_ops
        from vllm_pyramid.step.upload import upload

        call, policy, evictions = batch.call, batch.policy, batch.evictions
        if (fewest := int(evictions.query_lens[batch.shortened].min())) < self.queries:
            raise ValueError(
                f"a scorer looks at {self.queries} queries, and the step has {fewest} of a request"
            )
        kernels, future = observed_expected_ops(call.ops), None
        if self.expected:
            last = (evictions.points[batch.shortened] - 1).astype(np.int32)
            future = kernels.future_queries(
                call.query,
                batch.query_ends,
                upload(last, call.query.device),
                call.rotary,
                queries=self.queries,
                positions=self.future_positions,
            )
        shape = ScoreShape(policy.sinks, policy.window, self.kernel_size, self.expected)
        return kernels.observed_expected_scores(
            batch.last_queries(self.queries),
            call.value_cache,
            call.softmax,
            shape,
            future=future,
            value_scales=call.batch.value_scales,
            starts=batch.dead_prefixes,
        )


def _shares(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=1e-30)
