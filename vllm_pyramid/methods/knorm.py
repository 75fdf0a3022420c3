# SPDX-License-Identifier: Apache-2.0
"""Keep keys of low norm (Devoto et al., EMNLP 2024, arXiv:2406.11430)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class KeyNormScorer(Scorer):
    """The lower the L2 norm of a key, the more attention it tends to get: `-||k||`.

    Looks at keys alone, so it can evict at any time.
    """

    kind: Literal["knorm"] = "knorm"

    def score(self, view: ScorerInputs) -> torch.Tensor:
        """See the base."""
        return -view.keys.norm(dim=-1)
