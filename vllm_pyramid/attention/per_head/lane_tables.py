# SPDX-License-Identifier: Apache-2.0
"""Tables of KV heads of their own for attention kernels of CUDA, which read one for each request.

    what vLLM fills for a layer        [R_max, M], an entry of each KV head for G N tokens
    what the layer's kernels read      [R_max * G, M / G], a request of one KV head in each row

Where all heads of a layer share a table, `shifted_tables.py` shifts it in place. Here the tables of
vLLM stay as they are, and a launch for all layers gathers those of lanes into a second tensor. The
slots of the step's tokens are found from vLLM's tables, too: its own slots would be those of one
table for all heads. All tensors keep their addresses, so captured graphs read them.

Shape legend: L layers, R requests, G KV heads, T tokens of the step, N tokens of a block, M entries
of a request's table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload


class LaneTables:
    """Tables, lengths, slots and the order of queries of all lanes of this worker.

    Attributes:
        layers: the numbers of this pipeline stage's layers that evict: L of them. lanes: G.
        tables: L tables `[R_max, M]` int32, which vLLM fills.
        lane_tables: `[L, R_max * G, M / G]` int32. lens: `[L, R_max * G]` int32.
        skips: `[L, R_max * G]` int32, tokens that each lane leaves out.
        slots: `[L, T_max * G]` int64, of `token * G + head`; -1 behind the step's tokens.
        query_starts: `[R_max * G + 1]` int32, where the queries of each lane begin.
        order: `[T_max * G]` int64, `token * G + head` in the order of the lanes.
        max_lens: `[L]` on the host, the longest lane of each layer in this step; None where the
            host does not know it.
        no_skips: `[R_max * G]` int32, zeros: the skips of lanes within these tables.
        replays: whether the step replays a single graph, so that its metadata is not read.

    Args:
        max_num_reqs: R_max. max_num_tokens: T_max, with the padding of a captured batch.
        width: M. block_size: N.
        device: the device of the attention.
    """

    def __init__(
        self,
        layers: slice,
        lanes: int,
        max_num_reqs: int,
        max_num_tokens: int,
        width: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.layers, self.lanes, self._block_size = layers, lanes, block_size
        num_layers = layers.stop - layers.start
        self.max_lens: npt.NDArray[np.int32] | None = None
        self.replays = False
        # Each layer's part begins at a multiple of 16 bytes; otherwise Triton compiles other
        # kernels for it.
        rows, tokens = -(-max_num_reqs // 4) * 4, -(-max_num_tokens // 2) * 2
        num_lanes = max_num_reqs * lanes

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False):  # as vLLM's buffers, some of which these tensors replace
            self._filled = numbers(num_layers, rows, width)[:, :max_num_reqs]
            self.lane_tables = numbers(num_layers, rows * lanes, width // lanes)[:, :num_lanes]
            self.lens, self.skips = (
                numbers(num_layers, rows * lanes)[:, :num_lanes] for _ in range(2)
            )
            self.no_skips = torch.zeros_like(self.lens[0])
            self.slots = numbers(num_layers, tokens * lanes, dtype=torch.int64).fill_(-1)
            self.query_starts = numbers(num_lanes + 1)
            self.order = numbers(tokens * lanes, dtype=torch.int64)
        self.tables = list(self._filled)
        self._slots_written = 0
        self._has_starts = False

    def place(self, layer: int) -> int:
        """Return the place of a layer that evicts in these tensors."""
        return layer - int(self.layers.start)

    def follow(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        step: Step,
        host_lens: npt.NDArray[np.int32] | None,
    ) -> None:
        """Write a step's lanes; arguments as of `update`."""
        assert step.layout is None, "all heads compute the same tokens"
        num_tokens = None if host_lens is None else int(step.scheduled.sum())
        self.update(seq_lens, query_starts, step.skips, host_lens, num_tokens)

    def update(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        skips: npt.NDArray[np.int32],
        host_lens: npt.NDArray[np.int32] | None,
        num_tokens: int | None,
    ) -> None:
        """Write the step's lanes from the tables that vLLM has just filled.

        Args:
            seq_lens: `[R]` int32, 0 in the padding rows of a captured batch.
            query_starts: `[R + 1]` int32.
            skips: `[lanes of all layers that evict, <= R]` int32 on the host; the other requests
                have skipped nothing.
            host_lens: `[<= R]`, the host's `seq_lens` of the requests with skips; None in a step
                without real requests, which has no skips and writes to no slot.
            num_tokens: T, without padding; None where `host_lens` is.
        """
        from vllm_pyramid.kernels.triton import lanes as kernels

        num_layers, count = len(self.tables), self.lanes
        num_rows, num_skips = len(seq_lens), skips.shape[1]
        first = int(self.layers.start) * count
        own = skips[first : first + num_layers * count].reshape(num_layers, count, num_skips)
        device_skips = self.skips[:, : num_rows * count]
        device_skips[:, num_skips * count :] = 0
        by_lane = np.ascontiguousarray(own.transpose(0, 2, 1)).reshape(num_layers, -1)
        device_skips[:, : num_skips * count].copy_(upload(by_lane, seq_lens.device))
        self.max_lens = None
        columns = self.lane_tables.shape[2]
        if host_lens is not None:
            columns = -(-int(host_lens.max()) // self._block_size)
            self.max_lens = (host_lens - own).max(axis=(1, 2))
        kernels.gather_lanes(
            self.lane_tables,
            self.lens[:, : num_rows * count],
            self._filled,
            device_skips,
            seq_lens,
            self._block_size,
            columns,
        )
        self._write_starts(query_starts)
        if num_tokens is None:
            self._forget_slots()
            return
        kernels.lane_slots(
            self.slots,
            self._filled,
            query_starts,
            seq_lens,
            count,
            self._block_size,
            self._slots_written,
        )
        self._slots_written = num_tokens * count

    def _write_starts(self, query_starts: torch.Tensor) -> None:
        from vllm_pyramid.kernels.triton import lanes as kernels

        kernels.lane_rows(self.query_starts, self.order, query_starts, self.lanes)
        self._has_starts = True

    def _forget_slots(self) -> None:
        if self._slots_written:
            self.slots.fill_(-1)
            self._slots_written = 0

    def describe(self, common: Any, layer: int) -> None:
        """Make vLLM's metadata of a step those of a layer's lanes.

        Args:
            common: a copy of vLLM's `CommonAttentionMetadata`. Its `query_start_loc_cpu` stays that
                of the requests; builders without context parallelism do not read it.
        """
        place, rows = self.place(layer), common.num_reqs * self.lanes
        if not self._has_starts:  # a capture, for which vLLM prepares no step
            self._write_starts(common.query_start_loc[: common.num_reqs + 1])
            self._has_starts = False
        common.num_reqs = rows
        common.num_actual_tokens *= self.lanes
        common.block_table_tensor = self.lane_tables[place][:rows]
        common.seq_lens = self.lens[place, :rows]
        common.query_start_loc = self.query_starts[: rows + 1]
        common.slot_mapping = self.slots_of(layer, len(common.slot_mapping))
        if self.max_lens is not None:
            common.max_seq_len = int(self.max_lens[place])

    def complete(self, metadata: Any, common: Any, layer: int) -> None:
        """Add to stock metadata what ours has more; `common` is as `describe` has made it."""
        metadata.kv_no_skips = self.no_skips[: common.num_reqs]
        metadata.kv_offsets = self.skips[self.place(layer), : common.num_reqs]
        metadata.kv_order = self.order_of(common)

    def order_of(self, common: Any) -> torch.Tensor | None:
        """Return the queries in the order of the lanes; None: they are in that order.

        Args:
            common: as `describe` has made them.
        """
        return None if common.max_query_len == 1 else self.order[: common.num_actual_tokens]

    def slots_of(self, layer: int, num_tokens: int) -> torch.Tensor:
        """Return the slots of a layer's tokens and heads, `[num_tokens * G]` int64."""
        return self.slots[self.place(layer)][: num_tokens * self.lanes]

    def warm_up(self) -> None:
        """Launch all kernels, with one request that has no tokens."""
        starts = torch.zeros_like(self.query_starts[:2])
        skips = np.zeros((self.layers.stop * self.lanes, 1), np.int32)
        self.update(self.no_skips[:1], starts, skips, np.zeros(1, np.int32), 0)
        self.update(self.no_skips[:1], starts, skips, None, None)

    def forget_step(self) -> None:
        """Forget the last step before graphs are captured, on tables that vLLM has cleared."""
        self.max_lens, self._has_starts = None, False
        self.lens.fill_(1)
        self.lane_tables.zero_()
        self._forget_slots()
