# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of a layer, for scorers that look at queries or keys without it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """Rotations by position, as vLLM's layers hold them.

    Attributes:
        cos_sin: `[positions, R]`, the R / 2 cosines and then the R / 2 sines; the first R <= D
            channels of a head are rotated.
        halves: whether channel i is paired with channel i + R / 2 (NeoX); else 2 i with 2 i + 1
            (GPT-J).
    """

    cos_sin: torch.Tensor
    halves: bool = True

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of positions, `[..., R / 2]` float32 each."""
        cos, sin = self.cos_sin[positions].float().chunk(2, dim=-1)
        return cos, sin

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `x`, `[..., D]`, by the cosines and sines of angles, `[..., R / 2]` each."""
        size = 2 * cos.shape[-1]
        turned, rest = x[..., :size], x[..., size:]
        if self.halves:
            first, second = turned.chunk(2, dim=-1)
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
        pair = first * cos - second * sin, second * cos + first * sin
        if self.halves:
            return torch.cat([*pair, rest], dim=-1)
        return torch.cat([torch.stack(pair, dim=-1).flatten(-2), rest], dim=-1)

    def turn_back(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Undo the rotation of `x`, `[n, ..., D]`, at `positions`, `[n]`."""
        cos, sin = self.at(positions)
        while cos.dim() < x.dim():
            cos, sin = cos[:, None], sin[:, None]
        squares = cos.square() + sin.square()  # 1, or more where the embedding scales (YaRN)
        return self.turn(x, cos / squares, -sin / squares)

    def mean_turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the mean of `x`, `[..., D]`, rotated to each of `positions`."""
        known = positions.clamp(max=len(self.cos_sin) - 1)
        cos, sin = self.at(known)
        return self.turn(x, cos.mean(dim=0), sin.mean(dim=0))
