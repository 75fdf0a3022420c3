# SPDX-License-Identifier: Apache-2.0
"""Keep what stands out against the tokens that follow (LagKV, arXiv:2504.04704)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class LagKVScorer(Scorer):
    """LagKV: keep the tokens that stand out against the tokens that follow them.

    Cuts the tokens behind the sinks into parts of `lag`. In each head, K and V of a part are scaled
    channel by channel to the minimum and maximum of the part that follows (arXiv:2504.04704). Their
    standard deviation over the channels, softmax over the part, summed over K and V, orders the
    tokens within the part. The last full part and what is behind it have no successor and come
    first, later tokens before earlier ones. Looks at no query, so it can evict at any time.

    Attributes:
        lag: tokens of a part.
    """

    scores_sinks: ClassVar[bool] = False
    in_parts: ClassVar[bool] = True
    kind: Literal["lagkv"] = "lagkv"
    lag: int = Field(default=128, ge=2)

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        """Return the rank within a part, 0 .. 1; 1 and more for the most recent tokens."""
        scores = (1 + inputs.places / inputs.num_tokens).repeat(inputs.num_kv_heads, 1)
        parts = (inputs.num_tokens - inputs.sinks) // self.lag - 1
        if parts >= 1:
            end = inputs.sinks + parts * self.lag
            uneven = self._unevenness(inputs.keys, inputs.sinks, parts)
            uneven = uneven + self._unevenness(inputs.values, inputs.sinks, parts)
            ranks = uneven.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
            scores[:, inputs.sinks : end] = ranks.flatten(1) / self.lag
        return scores

    def _unevenness(self, x: torch.Tensor, first: int, parts: int) -> torch.Tensor:
        """Return how uneven the channels of K or V, `[G, T, D]`, are: `[G, parts, lag]`."""
        cut = x[:, first : first + (parts + 1) * self.lag].unflatten(1, (parts + 1, self.lag))
        lows, highs = cut[:, 1:].amin(dim=2, keepdim=True), cut[:, 1:].amax(dim=2, keepdim=True)
        scaled = (cut[:, :-1] - lows) / (highs - lows).clamp(min=1e-6)  # some channels are constant
        return scaled.std(dim=-1).softmax(dim=-1)
