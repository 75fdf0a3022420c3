# SPDX-License-Identifier: Apache-2.0
"""Keep keys of low norm (Devoto et al., EMNLP 2024, arXiv:2406.11430)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class KeyNormScorer(Scorer):
    """Keep the keys with the lowest L2 norm: these tend to get the most attention.

    Scores a key by `-||k||` (arXiv:2406.11430). Looks at keys alone, so it can evict at any time.
    It has no parameters.
    """

    in_parts: ClassVar[bool] = True
    kind: Literal["knorm"] = "knorm"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        return -inputs.keys.norm(dim=-1)
