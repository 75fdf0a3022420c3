# SPDX-License-Identifier: Apache-2.0
"""A layer's rotary embedding, for scorers that look at queries or keys without it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """Rotations by position, as vLLM's layers hold them.

    Attributes:
        cos_sin: `[positions, R]`, the R / 2 cosines and then the R / 2 sines; R <= D channels of a
            head are rotated, the first ones.
        halves: whether channel i goes with channel i + R / 2 (NeoX); else 2 i with 2 i + 1 (GPT-J).
    """

    cos_sin: torch.Tensor
    halves: bool = True

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions, `[..., R / 2]` float32 each."""
        cos, sin = self.cos_sin[positions].float().chunk(2, dim=-1)
        return cos, sin

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x`, `[..., D]`, turned by angles, `[..., R / 2]`, or by their averages."""
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
        """What `x`, `[n, ..., D]` at `positions`, `[n]`, was before its rotation."""
        cos, sin = self.at(positions)
        while cos.dim() < x.dim():
            cos, sin = cos[:, None], sin[:, None]
        squares = cos.square() + sin.square()  # 1, or more where the embedding scales (YaRN)
        return self.turn(x, cos / squares, -sin / squares)

    def mean_turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x`, `[..., D]`, at each of `positions`, on average."""
        known = positions.clamp(max=len(self.cos_sin) - 1)
        cos, sin = self.at(known)
        return self.turn(x, cos.mean(dim=0), sin.mean(dim=0))
