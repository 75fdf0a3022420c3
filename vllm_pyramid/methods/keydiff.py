# SPDX-License-Identifier: Apache-2.0
"""Keep keys that differ from the others (KeyDiff, NeurIPS 2025, arXiv:2504.15364)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class KeyDiffScorer(Scorer):
    """Minus the cosine between a key and the mean direction of all keys of its head.

    The mean is that of the keys scaled to length 1, over all tokens that the layer holds. Looks at
    keys alone, so it can evict at any time.
    """

    kind: Literal["keydiff"] = "keydiff"

    def score(self, view: ScorerInputs) -> torch.Tensor:
        """See the base."""
        import torch.nn.functional as F

        anchor = F.normalize(view.keys, dim=-1).mean(dim=1, keepdim=True)
        return -F.cosine_similarity(view.keys, anchor, dim=-1)
