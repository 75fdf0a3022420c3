# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of what they are for: the same in any batch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
