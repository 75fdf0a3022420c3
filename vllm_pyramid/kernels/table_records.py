# SPDX-License-Identifier: Apache-2.0
"""Records of block tables: their addresses, and the rows of a step.

Shape legend: L layers that evict, R rows of a step, G tables of a layer (1, or its KV heads), M
entries of a request's table, W entries of a row that attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

# Of each group: address and row stride of its source and its target, tokens of a block, and its
# row of `num_blocks`.
FIELDS = 6


class TableGroups(NamedTuple):
    """Where the tables of KV cache groups come from and go to; made once, as addresses stay.

    The L groups that evict come first.

    Attributes:
        sources: of each group `[requests, M]` int32. targets: of each group `[>= R * G, W]` int32;
            of a group that evicts nothing `[>= R, M]`. They may be the sources.
        block_sizes: tokens of a block. places: of each group among all of vLLM's.
        num_evicting: L. per_layer: G; entry `i * G + g` of a source is entry i of table g.
        by_slot: whether a request's row in the sources is its slot, not its row in the step.
        numbers: the same for the kernel, `[groups, FIELDS]` int64.
    """

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    block_sizes: Sequence[int]
    places: Sequence[int]
    num_evicting: int
    per_layer: int
    by_slot: bool
    numbers: torch.Tensor

    @classmethod
    def of(
        cls,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        block_sizes: Sequence[int],
        places: Sequence[int],
        num_evicting: int,
        *,
        per_layer: int = 1,
        by_slot: bool = False,
    ) -> TableGroups:
        """Return the record of these tables; ValueError: rows are not int32, side by side."""
        numbers = np.zeros((len(sources), FIELDS), np.int64)
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            for table in (source, target):
                if table.dim() != 2 or table.stride(1) != 1 or table.dtype != torch.int32:
                    raise ValueError(
                        f"a table is {tuple(table.shape)} of {table.dtype} with the strides "
                        f"{table.stride()}: it must have rows of int32 side by side"
                    )
            pair = (source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0))
            numbers[index] = (*pair, block_sizes[index], places[index])
        on_device = torch.from_numpy(numbers)
        if (device := targets[0].device).type != "cpu":
            on_device = on_device.pin_memory().to(device, non_blocking=True)
        return cls(
            *(sources, targets, block_sizes, places, num_evicting, per_layer, by_slot, on_device)
        )

    @property
    def in_place(self) -> bool:
        """Whether rows are shifted where they stand."""
        return self.sources[0] is self.targets[0]


class StepRows(NamedTuple):
    """The rows of a step, of which the first `num_reqs` are requests and the others padding.

    Attributes:
        seq_lens: `[R]` int32. num_reqs: at most R.
        slots: `[>= num_reqs]` int64, the rows of the requests in sources `by_slot`; None: the step
            has no requests, or its rows are those of the sources.
        num_blocks: `[groups of vLLM, requests]` int32, what each slot holds; None: the groups that
            evict nothing have no tables here.
    """

    seq_lens: torch.Tensor
    num_reqs: int
    slots: torch.Tensor | None = None
    num_blocks: torch.Tensor | None = None
