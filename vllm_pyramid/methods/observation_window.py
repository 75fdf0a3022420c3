# SPDX-License-Identifier: Apache-2.0
"""Attention of the prompt's last queries: SnapKV, PyramidKV, and most methods since.

It costs, once a prompt and layer, the attention scores of `window` queries, a top-k and the copying
of the survivors. It needs the queries of the last `window` prompt tokens in one chunk.

`snapkv` and `pyramidkv` differ in the allocator alone. Their window of 8 is PyramidKV's `alpha`.
SnapKV's authors pool and select for each query head; here the query heads of a KV head are reduced
to one score, for which `snapkv-max` takes the maximum. How wide to pool: docs/policies.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


def odd(field: str) -> Any:
    """Return a validator of a pooling's width."""

    def check(value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"{field} must be odd, not {value}: a token is its own centre")
        return value

    return field_validator(field)(check)


class ObservationWindowScorer(Scorer):
    """SnapKV: keep the keys to which the prompt's last `window` queries attend.

    Scores a key by the float32 softmax over all keys, summed over the window's queries, reduced
    over the query heads that share a KV head, and pooled along the positions, so that neighbours
    stay together (arXiv:2404.14469, section 4; PyramidKV, arXiv:2406.02069, section 4.2.2).

    Attributes:
        pooling: `avg` or `max` with stride 1 and zero padding, or `none`.
        kernel_size: width of the pooling in tokens, odd.
        gqa_reduce: how the query heads of a group become one score: `mean`, `max` or `sum`.
    """

    needs_queries: ClassVar[bool] = True
    attention_mass: ClassVar[bool] = True
    joins_layers: ClassVar[bool] = True
    kind: Literal["observation_window"] = "observation_window"
    pooling: Literal["avg", "max", "none"] = "avg"
    kernel_size: int = Field(default=5, ge=1, le=1023)
    gqa_reduce: Literal["mean", "max", "sum"] = "mean"

    _odd = odd("kernel_size")

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if policy.schedule.every:
            raise ValueError(
                f"policy {policy.name!r} has the schedule {policy.schedule.kind!r}, but its scorer "
                f"{self.kind!r} has no scores during generation: choose one that accumulates "
                "(accumulated_attention, persistence) or recency"
            )

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch.nn.functional as F

        mass = inputs.attention().sum(dim=1)[:, : inputs.num_tokens - inputs.window]
        mass = inputs.reduce_groups(mass, self.gqa_reduce)
        if self.pooling != "none":
            pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
            mass = pool(mass, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return F.pad(mass, (0, inputs.window))

    def scores(self, batch: EvictionBatch) -> torch.Tensor:
        from vllm_pyramid.kernels.records import Reduction

        prompts, softmax = batch.last_queries(batch.policy.window), batch.call.softmax
        reduction = Reduction(self.gqa_reduce, self.pooling, self.kernel_size)
        return batch.call.ops.window_scores(prompts, softmax, reduction)
