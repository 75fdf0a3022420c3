# SPDX-License-Identifier: Apache-2.0
"""Short tables for attention kernels that know nothing of skips (FlashAttention, vLLM's Triton).

    what vLLM wrote for the step      what layer l's kernel reads
    [x][x][x][7][2][9]   skip 3 N     [7][2][9][0][0][0]    length seq_len - skip

vLLM fills a tensor a KV cache group at every step: from the tables of all requests (second runner)
or from the host (first). Here these tensors are the layers of one, and one launch shifts all rows
in place, between vLLM's filling and the attention. Captured graphs read these addresses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.step.upload import upload


class ShiftedTables:
    """Block tables and lengths of every layer of this worker, head blocks left out.

    `tables` takes the place of vLLM's own tensors of the same size, so what this adds to the
    device's memory are two tensors of `[L, R_max]` integers. That matters, because vLLM profiles
    its memory before any table exists: 80 layers, 1024 requests of 131072 tokens and blocks of 16
    make 2.5 GiB of tables.

    Attributes:
        tables: `[L, R_max, M]` int32. lens: `[L, R_max]` int32.
        max_lens: `[L]` on the host, the longest sequence that each layer attends to in this step;
            None where the host does not know it.
        skips: `[L, R_max]` int32, tokens that each row leaves out.
        no_skips: `[R_max]` int32, zeros: in these tables nobody has skipped anything.
        replays: whether the step replays one graph for all of it, so that nobody reads metadata.

    Args:
        layers: L of the layers that evict: those of this pipeline stage, or all.
        max_num_reqs: R_max. width: M, entries of a request's block table.
        block_size: tokens of a cache block. device: of the attention.
    """

    def __init__(
        self,
        layers: slice,
        max_num_reqs: int,
        width: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.layers, self.block_size = layers, block_size
        num_layers = layers.stop - layers.start
        self.max_lens: npt.NDArray[np.int32] | None = None
        self.replays = False
        # Each layer's part begins at a multiple of 16 bytes, as a tensor of its own would: a kernel
        # is another one where it does not.
        rows = -(-max_num_reqs // 4) * 4
        with torch.inference_mode(False):  # like the buffers of vLLM that they replace
            self.tables, self.lens, self.skips = (
                torch.zeros(shape, dtype=torch.int32, device=device)[:, :max_num_reqs]
                for shape in ((num_layers, rows, width), (num_layers, rows), (num_layers, rows))
            )
            self.no_skips = torch.zeros_like(self.lens[0])

    def place(self, layer: int) -> int:
        """Of a layer that evicts, its place in these tensors."""
        return layer - int(self.layers.start)

    def update(
        self,
        seq_lens: torch.Tensor,
        skips: npt.NDArray[np.int32],
        host_lens: npt.NDArray[np.int32] | None,
    ) -> None:
        """Shift the step's tables, which vLLM has just filled, and write the step's lengths.

        To be called once after each filling: a second call would shift what is shifted.

        Args:
            seq_lens: `[R]` int32, 0 in the padding rows of a captured batch.
            skips: `[layers that evict, <= R]` int32 on the host; requests behind it have skipped
                nothing.
            host_lens: `[<= R]`, what `seq_lens` holds of the requests with skips; None in a step
                without real requests, which has no skips.
        """
        from vllm_pyramid.ops.triton_tables import effective_lens, shift_block_tables_

        skips = skips[self.layers]
        num_rows, num_skips = seq_lens.shape[0], skips.shape[1]
        device_skips = self.skips[:, :num_rows]
        device_skips[:, num_skips:] = 0
        device_skips[:, :num_skips].copy_(upload(skips, seq_lens.device))
        num_columns = 0
        self.max_lens = None
        if host_lens is not None:
            num_columns = -(-int(host_lens.max()) // self.block_size)
            self.max_lens = (host_lens - skips).max(axis=1)
        shift_block_tables_(
            self.tables[:, :num_rows], device_skips, self.block_size, num_columns=num_columns
        )
        effective_lens(self.lens[:, :num_rows], seq_lens, device_skips)

    def forget_step(self) -> None:
        """Before graphs are captured, on tables that vLLM has cleared and without a step."""
        self.max_lens = None
        self.lens.fill_(1)
