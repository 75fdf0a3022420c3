# SPDX-License-Identifier: Apache-2.0
"""Keep tokens at random: the control that every comparison needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

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


# Random numbers that are functions of what they are for (of Keyformer, too): the same in any batch,
# on any device.
_WORD = 0xFFFFFFFF


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit words held in int64, one to one; the odd constants keep products within int64."""
    for shift, factor in ((16, 0x045D9F3B), (15, 0x2C1B3C6D), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x


def uniform(seed: int, *axes: torch.Tensor) -> torch.Tensor:
    """Return numbers in (0, 1), float32, in the shape that `axes`, integers, broadcast to."""
    import torch

    word = torch.full((), seed & _WORD, dtype=torch.int64, device=axes[0].device)
    for axis in axes:
        word = _mixed((word + 0x9E3779B9 + axis.long()) & _WORD)
    return ((word >> 9).float() + 0.5) / 2**23  # 24 bits, all of which float32 holds
