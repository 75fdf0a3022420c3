# SPDX-License-Identifier: Apache-2.0
"""The slots of a step's tokens, computed for all layers at once: only their block ids differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]

PAD_SLOT = -1


class HostSlots:
    """Replaces `MultiGroupBlockTable.compute_slot_mapping` where the host is the device.

    `groups` are vLLM's block tables of each layer, with `slot_mapping.gpu` `[max tokens]` int64,
    written.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._filled = [len(group.slot_mapping.gpu) for group in groups]

    def __call__(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write every layer's slots, `block id * block size + offset`, and `PAD_SLOT` behind them.

        `query_start_loc` is `[>= num_reqs + 1]` int32, `positions` `[tokens]` int64.
        """
        count = len(positions)
        starts = query_start_loc.numpy()[: num_reqs + 1]
        requests = np.repeat(np.arange(num_reqs), np.diff(starts))
        by_block_size: dict[int, tuple[Numbers, Numbers]] = {}  # table entries and offsets
        for index, group in enumerate(self._groups):
            if (found := by_block_size.get(group.block_size)) is None:
                found = np.divmod(positions.numpy(), group.block_size)
                by_block_size[group.block_size] = found
            entries, offsets = found
            slots = group.slot_mapping.gpu.numpy()
            step_slots = slots[:count]
            np.multiply(
                group.block_table.gpu.numpy()[requests, entries],
                group.block_size,
                out=step_slots,
                dtype=np.int64,
            )
            step_slots += offsets
            slots[count : self._filled[index]] = PAD_SLOT  # padding follows already
            self._filled[index] = count
