# SPDX-License-Identifier: Apache-2.0
"""Short tables for attention kernels that know nothing of skips (FlashAttention, vLLM's Triton).

    what the scheduler wrote          what layer l's kernel reads
    [x][x][x][7][2][9]   skip 3 N     [7][2][9]    length seq_len - skip

One launch writes the tables and lengths of all layers. The buffers are allocated once: captured
graphs read these addresses.
"""

from __future__ import annotations

import numpy.typing as npt
import torch

from vllm_pyramid.worker.retention import as_int32


class ShiftedTables:
    """Block tables and lengths of every layer, head blocks left out.

    Attributes:
        tables: `[L, R_max, M]` int32. lens: `[L, R_max]` int32.

    Args:
        num_layers: L. max_num_reqs: R_max. width: M, entries of a request's block table.
        block_size: tokens of a cache block. device: of the attention.
    """

    def __init__(
        self,
        num_layers: int,
        max_num_reqs: int,
        width: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.tables = torch.zeros((num_layers, max_num_reqs, width), dtype=torch.int32).to(device)
        self.lens = torch.zeros((num_layers, max_num_reqs), dtype=torch.int32).to(device)
        self._skips = torch.zeros_like(self.lens)

    def update(self, source: torch.Tensor, seq_lens: torch.Tensor, skips: npt.NDArray) -> None:
        """Write the step's tables and lengths.

        Args:
            source: `[L, R, M]` int32, the tables as the scheduler filled them; padding rows of a
                captured batch included. seq_lens: `[R]` int32.
            skips: `[L, <= R]` int32 on the host; requests behind it have skipped nothing.
        """
        from vllm_pyramid.ops.triton_tables import effective_lens, gather_shifted_block_tables

        num_rows, num_skips = source.shape[1], skips.shape[1]
        device_skips = self._skips[:, :num_rows]
        if num_skips < num_rows:
            device_skips[:, num_skips:] = 0
        device_skips[:, :num_skips].copy_(as_int32(skips, source.device))
        gather_shifted_block_tables(
            self.tables[:, :num_rows], source, device_skips, self.block_size
        )
        effective_lens(self.lens[:, :num_rows], seq_lens, device_skips)
