# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of a layer, for scorers that look at queries or keys without it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

# Radians by which an entry of a table of 16-bit numbers may miss its angle, and more.
_ROUNDED = 0.05


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

    @cached_property
    def frequencies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The radians by which each pair turns from one position to the next, and its factor.

        The table's cosines and sines may be 16-bit numbers, so a frequency is read off at positions
        1, 2, 4 ...: each doubles the digits that are known of it.

        Returns:
            `[R / 2]` float64 radians, and `[R / 2]` float32, 1 unless the embedding scales.

        Raises:
            ValueError: the angles are not proportional to the positions.
        """
        positions = [2**i for i in range((len(self.cos_sin) - 1).bit_length() - 1)]
        rows = torch.stack([self.cos_sin[position] for position in positions])
        cos, sin = (part.double() for part in rows.chunk(2, dim=-1))
        angles = torch.atan2(sin, cos)
        found = angles[0]
        for position, angle in zip(positions, angles, strict=True):
            turns = torch.round((position * found - angle) / (2 * torch.pi))
            better = (angle + 2 * torch.pi * turns) / position
            if ((better - found).abs() * position > _ROUNDED).any():
                raise ValueError("the angles of its rotary embedding do not grow by position alone")
            found = better
        return found, self.cos_sin[0].float().chunk(2, dim=-1)[0]

    def lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Return the length of each rotated pair of `x`, `[..., D]`: `[..., R / 2]`."""
        turned = x[..., : self.cos_sin.shape[-1]]
        if self.halves:
            return torch.hypot(*turned.chunk(2, dim=-1))
        return torch.hypot(turned[..., ::2], turned[..., 1::2])

    def mean_turn_ahead(
        self, x: torch.Tensor, position: int, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean of `x`, `[..., D]`, rotated to `position` and each of `[n]` offsets ahead
        of it.

        Unlike `mean_turn` it is exact behind the table's end.
        """
        radians, factor = self.frequencies
        angles = (position + offsets.double())[:, None] * radians
        cos, sin = angles.cos().mean(dim=0).float(), angles.sin().mean(dim=0).float()
        return self.turn(x, factor * cos, factor * sin)

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
