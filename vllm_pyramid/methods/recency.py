# SPDX-License-Identifier: Apache-2.0
"""Keep the first and the most recent tokens (StreamingLLM, arXiv:2309.17453; window attention).

It costs the copying of the survivors, once at the prompt's end. `{"sinks": 0}` keeps the most
recent tokens alone. `{"schedule": "interval"}` makes a rolling cache, which evicts 64 tokens at
once; the paper drops one for each new one and counts positions within the cache, here every token
keeps its position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class RecencyScorer(Scorer):
    """StreamingLLM: keep the policy's sinks, and the most recent tokens.

    Scores a token by its place (arXiv:2309.17453, section 3.2). It has no parameters.
    """

    in_parts: ClassVar[bool] = True
    kind: Literal["recency"] = "recency"

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 8

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        return inputs.places.float().expand(inputs.num_kv_heads, -1)
