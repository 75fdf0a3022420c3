# SPDX-License-Identifier: Apache-2.0
"""Keep what adds most to the information in V (CapKV, ICML 2026, arXiv:2604.25975)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class CapKVScorer(Scorer):
    """CapKV: keep the tokens whose values add most to the information in the cache.

    Scores a token by the leverage of its value, `w v A^-1 v` with `A = I + sum(w v v)` over the
    tokens of a head: values that say the same share their leverage, so a copy is worth less than
    something new. The weight is `w = exp(tau cos(k, m))`, divided by the largest; m is the mean of
    the window's queries without rotary embedding, rotated to the positions to come on average. The
    score is the mean over the query heads of a group. Sinks take no part.

    Follows the authors' release of arXiv:2604.25975. The paper writes a dot product for the cosine,
    and takes the mean of all the prompt's queries; here it is that of the last `window`, since a
    long prompt is computed in chunks.

    Attributes:
        tau: weight of the cosine between a key and the mean query; 5 is the paper's best average.
        future_positions: number of positions to come over which the rotation is averaged.
    """

    scores_sinks: ClassVar[bool] = False
    needs_queries: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["capkv"] = "capkv"
    tau: float = Field(default=5.0, ge=0)
    future_positions: int = Field(default=512, ge=1)

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 12 * head_size + 16  # most of them in float64

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        mean = inputs.unrotated_queries().mean(dim=0)
        mean = F.normalize(inputs.at_future_positions(mean, self.future_positions), dim=-1)
        keys = F.normalize(inputs.keys[:, inputs.sinks :], dim=-1)
        # In float64: values that repeat one another outweigh the identity beyond float32.
        values = inputs.values[:, inputs.sinks :].double()
        identity = torch.eye(inputs.head_size, dtype=torch.float64, device=keys.device)
        total = torch.zeros(keys.shape[:2], dtype=torch.float64, device=keys.device)
        for head in mean.unflatten(0, (inputs.num_kv_heads, inputs.group)).unbind(dim=1):
            likeness = (keys @ head[..., None])[..., 0].clamp(-1, 1)
            weights = (self.tau * (likeness - likeness.amax(dim=-1, keepdim=True))).exp()
            scaled = values * (weights + 1e-6).sqrt()[..., None]
            root = torch.linalg.cholesky(identity + scaled.transpose(1, 2) @ scaled)
            half = torch.linalg.solve_triangular(root, values.transpose(1, 2), upper=False)
            total += weights * half.square().sum(dim=1)
        return F.pad((total / inputs.group).float(), (inputs.sinks, 0))
