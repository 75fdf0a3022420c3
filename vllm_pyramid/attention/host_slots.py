# SPDX-License-Identifier: Apache-2.0
"""Slots of a step's tokens, for all layers at once.

vLLM works them out for each KV cache group by itself. Here every layer is a group, and all of them
have the same tokens at the same positions: only the block ids differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]

PAD_SLOT = -1


class HostSlots:
    """Takes the place of `MultiGroupBlockTable.compute_slot_mapping` where the host is the device.

    Args:
        groups: vLLM's block table of each layer: `block_table.gpu` `[max requests, M]` int32,
            `slot_mapping.gpu` `[max tokens]` int64 (written), `block_size`.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._filled = [len(group.slot_mapping.gpu) for group in groups]

    def __call__(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write every layer's slots, `block id * block size + row`, and `PAD_SLOT` behind them.

        Args:
            query_start_loc: `[>= num_reqs + 1]` int32. positions: `[tokens]` int64.
        """
        places, count = positions.numpy(), len(positions)
        starts = query_start_loc.numpy()[: num_reqs + 1]
        requests = np.repeat(np.arange(num_reqs), np.diff(starts))
        split: dict[int, tuple[Numbers, Numbers]] = {}  # by block size: entries and rows
        for index, group in enumerate(self._groups):
            if (found := split.get(group.block_size)) is None:
                found = split[group.block_size] = np.divmod(places, group.block_size)
            entries, rows = found
            slots = group.slot_mapping.gpu.numpy()
            now = slots[:count]
            np.multiply(
                group.block_table.gpu.numpy()[requests, entries],
                group.block_size,
                out=now,
                dtype=np.int64,
            )
            now += rows
            slots[count : self._filled[index]] = PAD_SLOT  # behind that is padding already
            self._filled[index] = count
