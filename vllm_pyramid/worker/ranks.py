# SPDX-License-Identifier: Apache-2.0
"""vLLM's tensor-parallel group in the form that methods see."""

from __future__ import annotations

from typing import Any

import torch


class TensorParallelRanks:
    """`step.ranks.Ranks` over vLLM's group, which returns its input where there is one rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank_in_group, group.world_size

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        total: torch.Tensor = self._group.all_reduce(values)
        return total

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, bit for bit."""
        first: torch.Tensor = self._group.broadcast(values, src=0)
        return first

    def any(self, is_true: bool) -> bool:
        """Return whether `is_true` on some rank."""
        if self.size == 1:
            return is_true
        count = torch.tensor([int(is_true)])
        torch.distributed.all_reduce(count, group=self._group.cpu_group)
        return bool(count)
