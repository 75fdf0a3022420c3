# SPDX-License-Identifier: Apache-2.0
"""Keep keys that differ from the others (KeyDiff, NeurIPS 2025, arXiv:2504.15364).

It costs two passes over the keys, in PyTorch. With `{"schedule": "interval"}` it evicts while
generating, too. It looks at no question, so it loses facts at an eviction at the prompt's end
(docs/quality.md), and is the best scorer measured for evictions inside the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class KeyDiffScorer(Scorer):
    """KeyDiff: keep the keys that differ most from the others of their head.

    Scores a key by minus its cosine with the mean direction of all keys of the head that the layer
    holds, each scaled to length 1 (arXiv:2504.15364). Looks at keys alone, so it can evict at any
    time. It has no parameters.
    """

    in_parts: ClassVar[bool] = True
    kind: Literal["keydiff"] = "keydiff"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch.nn.functional as F

        anchor = F.normalize(inputs.keys, dim=-1).mean(dim=1, keepdim=True)
        return -F.cosine_similarity(inputs.keys, anchor, dim=-1)
