# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel ranks, as methods see them."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """The tensor-parallel ranks: each has some of the KV heads, and all must agree on lengths.

    Attributes:
        rank: of this worker, from 0. size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values, bit for bit."""


class OneRank:
    """No tensor parallelism."""

    rank = 0
    size = 1

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return values
