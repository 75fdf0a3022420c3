# SPDX-License-Identifier: Apache-2.0
"""Keep the tokens without which a layer's output would change most (ReST-KV, ICLR 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.observation_window import odd
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

# Queries whose attention is in memory at once.
_AT_ONCE = 8
# The least share of attention that other tokens are taken to have.
_OTHERS = 1e-6


class OutputChangeScorer(Scorer):
    """ReST-KV: keep the tokens whose loss would change the layer's output most.

    With a the attention that a query head gives to a token, smoothed over the window's queries, and
    o the sum of a times V over all tokens before the window, leaving out a token with the value v
    changes the output by `a / (1 - a) * |W (o - v)|`, W being the columns of the output projection
    that the head feeds. That is the score, pooled along the positions.

    - *Smoothed over time*: from the window's first query to its last one, each counts `alpha` and
      what came before `1 - alpha`.
    - *Pooled adaptively*: where the best `top` tokens of the window's second half of queries lie d
      positions before those of its first half (on average; d < 0: behind them), a token gets the
      mean over `max(kernel_size, 2 * floor(|d| / drift) + 1)` scores around the one that is
      `d / drift` positions behind it, rounded towards 0. The scores at both ends are repeated.

    Follows the authors' release (an-yongqi/rest-kv) with its published settings. It keeps tokens
    for each query head; here the score is the mean over the query heads of a group. It measures d
    on as many tokens as the layer keeps, which a scorer does not know: `top` is a setting.

    Attributes:
        alpha: weight of the later query, above 0 and at most 1; 1 is the last query alone.
        kernel_size: the least width of the pooling in tokens, odd.
        drift: positions of drift that widen the pooling by 2 tokens and move it by 1.
        top: number of each query's best tokens on which the drift is measured.
    """

    needs_queries: ClassVar[bool] = True
    needs_output: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["output_change"] = "output_change"
    alpha: float = Field(default=0.3, gt=0.0, le=1.0)
    kernel_size: int = Field(default=5, ge=1, le=1023)
    drift: int = Field(default=2000, ge=1)
    top: int = Field(default=128, ge=1)

    _odd = odd("kernel_size")

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if policy.window < 2:
            raise ValueError(
                f"policy {policy.name!r}: {self.kind} compares the halves of the window, so "
                f"`window` must be at least 2, not {policy.window}"
            )

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 4 * head_size + 3 * _AT_ONCE * (group + 1) + 6 * group + 16

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch.nn.functional as F

        heads = inputs.num_kv_heads, inputs.group
        values = inputs.values[:, : inputs.num_tokens - inputs.window]
        attention, drift = (x.unflatten(0, heads) for x in self._observed(inputs))
        output = attention @ values  # [G, H / G, D]
        factors = inputs.output_factors.unflatten(0, heads)
        total = attention.new_zeros(values.shape[:2])
        for head in range(inputs.group):  # `[G, T]` at a time
            share = attention[:, head]
            change = (output[:, head, None] - values) @ factors[:, head].transpose(1, 2)
            scores = share / (1 - share).clamp(min=_OTHERS) * change.norm(dim=-1)
            total += self._pooled(scores, drift[:, head])
        return F.pad(total / inputs.group, (0, inputs.window))

    def _observed(self, inputs: ScorerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smoothed attention `[H, T - window]`, and how far its best tokens move `[H]`.

        The drift is positive where those of the later queries lie earlier in the prompt.
        """
        import torch

        window, last = inputs.window, len(inputs.queries)
        smoothed, places = None, []
        moves = inputs.num_tokens > self.drift  # otherwise no pooling is widened or moved
        for first in range(last - window, last, _AT_ONCE):
            weights = inputs.attention_of(slice(first, min(first + _AT_ONCE, last)))
            if moves:
                best = weights.topk(min(self.top, inputs.num_tokens), dim=-1, sorted=False).indices
                places.append(best.float().mean(dim=-1))
            for query in weights[..., : inputs.num_tokens - window].unbind(dim=1):
                smoothed = query if smoothed is None else smoothed.lerp(query, self.alpha)
        assert smoothed is not None
        if not moves:
            return smoothed, smoothed.new_zeros(len(smoothed))
        mean = torch.cat(places, dim=1)  # [H, window]
        half = window // 2
        return smoothed, mean[:, :half].mean(dim=1) - mean[:, half:].mean(dim=1)

    def _pooled(self, scores: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
        """Return `[G, T]` scores, each row pooled as its drift `[G]` says."""
        import torch
        import torch.nn.functional as F

        rows = []
        for row, moved in zip(scores, drift.tolist(), strict=True):
            shift = int(moved / self.drift)
            width = max(self.kernel_size, 2 * abs(shift) + 1)
            ends = (width // 2 - shift, width // 2 + shift)
            rows.append(F.avg_pool1d(F.pad(row[None], ends, mode="replicate"), width, stride=1))
        return torch.cat(rows)
