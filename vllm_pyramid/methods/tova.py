# SPDX-License-Identifier: Apache-2.0
"""Keep what the last query attends to (TOVA, EMNLP 2024, arXiv:2401.06104)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class TovaScorer(Scorer):
    """TOVA: keep the tokens to which the last query attends.

    Scores a token by the last query's attention, averaged over all heads of the layer, so that all
    heads keep the same tokens (arXiv:2401.06104). With `window: 1` it can evict at any time, as the
    paper does at every token; a wider window protects more tokens and leaves the scores as they
    are. It has no parameters.
    """

    needs_queries: ClassVar[bool] = True
    kind: Literal["tova"] = "tova"

    def score(self, view: ScorerInputs) -> torch.Tensor:
        return view.mean_of_heads(view.attention(1)[:, 0]).expand(view.num_kv_heads, -1)
