# SPDX-License-Identifier: Apache-2.0
"""Keep what the last query attends to (TOVA, EMNLP 2024, arXiv:2401.06104)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class TovaScorer(Scorer):
    """TOVA: keep the tokens to which the last query attends.

    Scores a token by the last query's attention, averaged over all heads of the layer, so that all
    heads keep the same tokens (arXiv:2401.06104). With `window: 1` it can evict at any time, as the
    paper does at every token; a wider window protects more tokens and leaves the scores as they
    are. It has no parameters.
    """

    needs_queries: ClassVar[bool] = True
    asks_ranks: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["tova"] = "tova"

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 3 * head_size + 4 * group + 16

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch

        attention = torch.cat([part.attention(1)[:, 0] for part in inputs.parts()])
        return inputs.mean_of_heads(attention).expand(inputs.num_kv_heads, -1)

    def score_parts(self, inputs: ScorerInputs) -> torch.Tensor:
        """Return what `score` returns, which takes the mean over the heads of all parts."""
        return self.score(inputs)
