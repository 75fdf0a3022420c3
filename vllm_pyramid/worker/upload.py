# SPDX-License-Identifier: Apache-2.0
"""From the host's arrays to the device's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch


@dataclass(frozen=True)
class DeviceEvictions:
    """Some of a step's evicting requests, S of them, where the attention is.

    A layer that has evicted before is looked at from its first block on: positions in it are
    counted from there.

    Attributes:
        rows: `[S]` int64, their rows of the batch.
        query_ends, prompt_lens: `[S]` int32.
        keeps: `[L, S]` int32, tokens that stay in each layer.
        firsts: `[L, S]` int64, the first block; None if all of them have evicted nothing yet.
        lens: `[L, S]` int32, tokens from the first block on.
        deads: `[L, S]` int32, tokens of the first block that were evicted before.
    """

    rows: torch.Tensor
    query_ends: torch.Tensor
    prompt_lens: torch.Tensor
    keeps: torch.Tensor
    firsts: torch.Tensor | None
    lens: torch.Tensor
    deads: torch.Tensor

    def tables(self, block_table: torch.Tensor, layer: int, shifted: bool) -> torch.Tensor:
        """The block tables of a layer from its first block on: `[S, M]` int32.

        Args:
            block_table: `[>= R, M]` int32. shifted: it begins with the first blocks already.
        """
        tables = block_table.index_select(0, self.rows)
        if self.firsts is None or shifted:
            return tables
        columns = torch.arange(tables.shape[1], device=tables.device)
        places = self.firsts[layer][:, None] + columns
        return tables.gather(1, places.clamp_(max=tables.shape[1] - 1))


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of `values` on the device; on the CPU it shares their memory.

    The copy goes through pinned memory and does not wait. The allocator of pinned memory keeps the
    source until the device has read it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
