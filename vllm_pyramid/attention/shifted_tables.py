# SPDX-License-Identifier: Apache-2.0
"""Shifted block tables for attention kernels without skips (FlashAttention, vLLM's Triton).

    a request's blocks in layer l     what the layer's kernel reads
    [x][x][x][7][2][9]   skip 3 N     [7][2][9]    length seq_len - skip

vLLM's second runner keeps the tables of all requests, each in its slot; one launch gathers those of
the step, shifted, with their lengths. The first runner copies whole tables into the step's; the
same launch shifts these in place. Captured graphs read the step's tables, whose addresses stay. The
skips of all slots stay on the device, too: only those that have changed travel.

Shape legend: L layers of this worker that evict, R rows of a step, G tables of a layer: 1, or one
for each KV head. M entries of a request's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.kernels.table_records import StepRows, TableGroups
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload


@dataclass(frozen=True)
class HeldTables:
    """Tables of all requests, apart from those of a step: vLLM's second runner has them.

    Attributes:
        sources: of each layer that evicts `[slots, M]` int32; they may be in host memory.
        others: `(table of all requests, table of the step, place)` of each group that evicts
            nothing; its place is its number among vLLM's groups.
    """

    sources: Sequence[torch.Tensor]
    others: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = ()


class Slots(NamedTuple):
    """Where the requests of a step stand in `HeldTables`.

    Attributes:
        on_host, on_device: `[R]` of the step's requests, in batch order; int64 on the device.
        num_blocks: `[groups of vLLM, slots]` int32 on the device, blocks that each slot holds.
    """

    on_host: npt.NDArray[np.integer[Any]]
    on_device: torch.Tensor
    num_blocks: torch.Tensor


class ShiftedTables:
    """Block tables and lengths of every layer of this worker, without the blocks that were skipped.

    `of_runner` replaces vLLM's tensors of the step, since vLLM profiles its memory before any table
    exists: 80 layers, 1024 requests of 131072 tokens and blocks of 16 tokens have 2.5 GiB of
    tables.

    Attributes:
        layers: the numbers of this pipeline stage's layers that evict. per_layer: G.
        tables: what attention reads, L tables `[R_max * G, M / G]` int32.
        of_runner: what vLLM takes for the step's, L tables of R_max rows: the same memory, except
            where vLLM fills `[R_max, M]` and G is not 1.
        lens, skips: `[L, R_max * G]` int32, of each row, and tokens that it leaves out.
        max_lens: `[L]` on the host, the longest sequence that each layer attends to in this step;
            None where the host does not know it.
        no_skips: `[R_max * G]` int32, zeros: the skips of requests within these tables.
        replays: whether the step replays a single graph, so that its metadata is not read.

    Args:
        max_num_reqs: R_max, and the number of slots.
        shapes: M and the tokens of a block, of each layer. held: None: vLLM fills the tables of a
            step.
    """

    def __init__(
        self,
        layers: slice,
        max_num_reqs: int,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
        held: HeldTables | None = None,
        *,
        per_layer: int = 1,
    ) -> None:
        self.layers, self.per_layer = layers, per_layer
        num_layers = layers.stop - layers.start
        assert len(shapes) == num_layers, (shapes, layers)
        self.max_lens: npt.NDArray[np.int32] | None = None
        self.replays = False
        num_rows, num_tables = max_num_reqs * per_layer, num_layers * per_layer
        with torch.inference_mode(False):  # as vLLM's buffers, which these tensors replace
            self.tables = _one_memory(
                [(num_rows, width // per_layer) for width, _ in shapes], device
            )
            self.of_runner = self.tables
            if held is None and per_layer > 1:
                self.of_runner = _one_memory([(max_num_reqs, width) for width, _ in shapes], device)
            elif per_layer > 1:
                self.of_runner = [table.view(max_num_reqs, -1) for table in self.tables]
            rows = -(-num_rows // 4) * 4
            self.lens, self.skips = (
                torch.zeros(num_layers, rows, dtype=torch.int32, device=device)[:, :num_rows]
                for _ in range(2)
            )
            self.no_skips = torch.zeros_like(self.lens[0])
            self._of_slots = torch.zeros(max_num_reqs, num_tables, dtype=torch.int64, device=device)
        self._sent = np.zeros((num_tables, max_num_reqs), np.int32)  # `_of_slots`, on the host
        sources, others = self.of_runner, () if held is None else held.others
        if held is not None:
            sources = list(held.sources)
        self.groups = TableGroups.of(
            [*sources, *(source for source, _, _ in others)],
            [*self.tables, *(target for _, target, _ in others)],
            [size for _, size in shapes] + [0] * len(others),
            [0] * num_layers + [place for _, _, place in others],
            num_layers,
            per_layer=per_layer,
            by_slot=held is not None,
        )

    def place(self, layer: int) -> int:
        return layer - int(self.layers.start)

    def follow(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        step: Step,
        host_lens: npt.NDArray[np.int32] | None,
        slots: Slots | None = None,
    ) -> None:
        """Write a step's tables, as `update`. `query_starts`, `[R + 1]` int32, are requests'."""
        if (layout := step.layout) is None:
            self.update(seq_lens, step.skips, host_lens, slots=slots)
        else:
            self.update(seq_lens, layout.skips, host_lens, layout.seq_lens, slots=slots)

    def update(
        self,
        seq_lens: torch.Tensor,
        skips: npt.NDArray[np.int32],
        host_lens: npt.NDArray[np.int32] | None,
        layer_lens: npt.NDArray[np.int32] | None = None,
        *,
        slots: Slots | None = None,
    ) -> None:
        """Write the step's tables and lengths, once a step: a second call would shift rows again.

        Args:
            seq_lens: `[R]` int32, 0 in the padding rows of a captured batch.
            skips: `[tables of all layers that evict, <= R]` int32 on the host; other rows are
                padding.
            host_lens: `[<= R]`, the host's `seq_lens`; None in a step without real requests.
            layer_lens: `[layers that evict, R]`, at most `host_lens`, if layers compute different
                tokens.
            slots: of the step's requests, where tables are held.
        """
        from vllm_pyramid.kernels.triton.tables import gather_tables

        skips = skips[int(self.layers.start) * self.per_layer : self.layers.stop * self.per_layer]
        self.max_lens = None
        if host_lens is not None:
            self._send(skips, None if slots is None else slots.on_host)
            self.max_lens = (host_lens - skips).reshape(len(self.tables), -1).max(axis=1)
        gather_tables(
            self.groups,
            self.rows(seq_lens, 0 if host_lens is None else skips.shape[1], slots),
            self._of_slots,
            self.lens,
            self.skips,
        )
        if layer_lens is None:
            return
        if host_lens is None or len(host_lens) != len(seq_lens):
            raise RuntimeError(
                f"a step in which layers compute different tokens has {len(seq_lens)} rows, some "
                "of padding; report this"
            )
        layer_lens = layer_lens[self.layers] - skips
        self.max_lens = layer_lens.max(axis=1)
        # Only the device may know how many drafts of a decoding request were accepted.
        differences = upload(layer_lens - host_lens, seq_lens.device)
        torch.add(seq_lens, differences, out=self.lens[:, : len(seq_lens)])

    def rows(self, seq_lens: torch.Tensor, num_reqs: int, slots: Slots | None) -> StepRows:
        if slots is None:
            return StepRows(seq_lens, num_reqs)
        return StepRows(seq_lens, num_reqs, slots.on_device, slots.num_blocks)

    def _send(
        self, skips: npt.NDArray[np.int32], slots: npt.NDArray[np.integer[Any]] | None
    ) -> None:
        """Send the skips of the step's requests that are not on the device yet, in one copy."""
        count = skips.shape[1]
        sent = self._sent[:, :count] if slots is None else self._sent.take(slots, axis=1)
        if np.array_equal(sent, skips):
            return
        changed = np.flatnonzero((sent != skips).any(axis=0))
        places = changed if slots is None else slots[changed]
        numbers = np.empty((len(places), 1 + len(skips)), np.int64)
        numbers[:, 0], numbers[:, 1:] = places, skips[:, changed].T
        self._sent[:, places] = skips[:, changed]
        on_device = upload(numbers, self.lens.device)
        self._of_slots.index_copy_(0, on_device[:, 0], on_device[:, 1:])

    def describe(self, common: Any, layer: int) -> None:
        """Give a copy of vLLM's metadata of a step a layer's table and lengths."""
        place = self.place(layer)
        common.block_table_tensor = self.tables[place][: common.num_reqs]
        common.seq_lens = self.lens[place, : common.num_reqs]
        if self.max_lens is not None:
            # By it FlashAttention chooses in how many parts to split a row. Never so while a graph
            # is captured: that has no step, and keeps vLLM's bound, which holds for every replay.
            common.max_seq_len = int(self.max_lens[place])

    def complete(self, metadata: Any, common: Any, layer: int) -> None:
        """Add to stock metadata what ours has more; `common` is as `describe` has made it."""
        metadata.kv_no_skips = self.no_skips[: common.num_reqs]
        metadata.kv_offsets = self.skips[self.place(layer), : common.num_reqs]

    def warm_up(self) -> None:
        skips = np.zeros((self.layers.stop * self.per_layer, 1), np.int32)
        self.update(self.no_skips[:1], skips, None)

    def forget_step(self) -> None:
        """Forget the last step before graphs are captured, on tables that vLLM has cleared."""
        self.max_lens = None
        self.lens.fill_(1)


def _one_memory(shapes: Sequence[tuple[int, int]], device: torch.device) -> list[torch.Tensor]:
    """Return tables of zeros in one memory, each from a multiple of 16 bytes on (Triton)."""
    places = [-(-rows // 4) * 4 * width for rows, width in shapes]
    memory = torch.zeros(sum(places), dtype=torch.int32, device=device)
    parts = memory.split(places)
    return [
        part[: rows * width].view(rows, width)
        for part, (rows, width) in zip(parts, shapes, strict=True)
    ]
