# SPDX-License-Identifier: Apache-2.0
"""Keep tokens at random: the control that every comparison needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.methods.noise import uniform
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class RandomScorer(Scorer):
    """Keep tokens at random: the control for every comparison.

    Draws a number for each position, KV head and layer, the same for all requests and runs.

    Attributes:
        seed: of the numbers.
    """

    needs_positions: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["random"] = "random"
    seed: int = 0

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 16  # words of int64

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch

        heads = (
            torch.arange(inputs.num_kv_heads, device=inputs.places.device) + inputs.first_kv_head
        )
        return uniform(self.seed, (heads + inputs.layer * 2**16)[:, None], inputs.places)
