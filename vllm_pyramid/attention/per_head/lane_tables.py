# SPDX-License-Identifier: Apache-2.0
"""Tables of single KV heads for attention kernels of CUDA, which read one for each request.

    a request's blocks in a layer      [M], an entry of each KV head for G N tokens
    what the layer's kernels read      [R_max * G, M / G], a request of one KV head in each row

Slots are found here, too: vLLM finds slots of one table for all heads. All tensors keep their
addresses, so captured graphs read them.

Shape legend: L layers, R requests, G KV heads, T tokens of the step, N tokens of a block, M entries
of a request's table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.attention.shifted_tables import HeldTables, ShiftedTables, Slots
from vllm_pyramid.step.step import Step


class LaneTables(ShiftedTables):
    """Tables, lengths, slots and the order of queries of all lanes (G of a layer) of this worker.

    Attributes:
        slots: `[L, T_max * G]` int64, of `token * G + head`; -1 behind the step's tokens.
        query_starts: `[R_max * G + 1]` int32, where the queries of each lane begin.
        order: `[T_max * G]` int64, `token * G + head` in the order of the lanes.

    Args:
        max_num_tokens: T_max, with the padding of a captured batch. width: M. block_size: N.
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
        held: HeldTables | None = None,
    ) -> None:
        num_layers = layers.stop - layers.start
        shapes = [(width, block_size)] * num_layers
        super().__init__(layers, max_num_reqs, shapes, device, held, per_layer=lanes)
        self.lanes = lanes
        # As in `ShiftedTables`, each layer's part begins at a multiple of 16 bytes.
        places = -(-max_num_tokens // 2) * 2 * lanes
        with torch.inference_mode(False):
            self.slots = torch.full((num_layers, places), -1, dtype=torch.int64, device=device)
            self.order = torch.zeros(places, dtype=torch.int64, device=device)
            starts = max_num_reqs * lanes + 1
            self.query_starts = torch.zeros(starts, dtype=torch.int32, device=device)
        self._slots_written = 0
        self._has_starts = False

    def follow(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        step: Step,
        host_lens: npt.NDArray[np.int32] | None,
        slots: Slots | None = None,
    ) -> None:
        assert step.layout is None, "all heads compute the same tokens"
        num_tokens = None if host_lens is None else int(step.scheduled.sum())
        num_reqs = 0 if host_lens is None else len(host_lens)
        # Before a lane alone in its layer is shifted where vLLM has filled its table.
        self.find_slots(seq_lens, query_starts, num_reqs, num_tokens, slots)
        self.update(seq_lens, step.skips, host_lens, slots=slots)

    def find_slots(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        num_reqs: int,
        num_tokens: int | None,
        slots: Slots | None = None,
    ) -> None:
        """Write the slots of a step's tokens, and where the queries of each lane begin.

        `query_starts` is `[R + 1]` int32. `num_tokens` is T, without padding; None: without real
        requests, which write to no slot.
        """
        from vllm_pyramid.kernels.triton import lanes as kernels

        self._write_starts(query_starts)
        if num_tokens is None:
            self._forget_slots()
            return
        rows = self.rows(seq_lens, num_reqs, slots)
        kernels.lane_slots(self.slots, self.groups, rows, query_starts, self._slots_written)
        self._slots_written = num_tokens * self.lanes

    def _write_starts(self, query_starts: torch.Tensor) -> None:
        from vllm_pyramid.kernels.triton import lanes as kernels

        kernels.lane_rows(self.query_starts, self.order, query_starts, self.lanes)
        self._has_starts = True

    def _forget_slots(self) -> None:
        if self._slots_written:
            self.slots.fill_(-1)
            self._slots_written = 0

    def describe(self, common: Any, layer: int) -> None:
        """Make a copy of vLLM's metadata of a step describe a layer's lanes.

        Its `query_start_loc_cpu` stays that of the requests: builders without context parallelism
        do not read it.
        """
        if not self._has_starts:  # a capture, for which vLLM prepares no step
            self._write_starts(common.query_start_loc[: common.num_reqs + 1])
            self._has_starts = False
        common.num_reqs *= self.lanes
        common.num_actual_tokens *= self.lanes
        common.query_start_loc = self.query_starts[: common.num_reqs + 1]
        common.slot_mapping = self.slots_of(layer, len(common.slot_mapping))
        super().describe(common, layer)

    def complete(self, metadata: Any, common: Any, layer: int) -> None:
        super().complete(metadata, common, layer)
        metadata.kv_order = self.order_of(common)

    def order_of(self, common: Any) -> torch.Tensor | None:
        """Return the queries in lane order, of what `describe` made; None: they are in order."""
        return None if common.max_query_len == 1 else self.order[: common.num_actual_tokens]

    def slots_of(self, layer: int, num_tokens: int) -> torch.Tensor:
        """Return the slots of a layer's tokens and heads, `[num_tokens * G]` int64."""
        return self.slots[self.place(layer)][: num_tokens * self.lanes]

    def warm_up(self) -> None:
        super().warm_up()
        starts = torch.zeros_like(self.query_starts[:2])
        self.find_slots(self.no_skips[:1], starts, 0, 0)

    def forget_step(self) -> None:
        super().forget_step()
        self._has_starts = False
        for table in self.tables:
            table.zero_()
        self._forget_slots()
