# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel ranks, as methods see them."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """The `size` tensor-parallel ranks: each has some KV heads, and all must agree on lengths."""

    rank: int
    size: int

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks."""

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, bit for bit."""

    def any(self, is_true: bool) -> bool:
        """Return whether `is_true` on some rank. The hosts wait for one another, no device does."""
