# SPDX-License-Identifier: Apache-2.0
"""Shifted block tables for attention kernels without skips (FlashAttention, vLLM's Triton).

    what vLLM wrote for the step      what layer l's kernel reads
    [x][x][x][7][2][9]   skip 3 N     [7][2][9][0][0][0]    length seq_len - skip

vLLM fills a tensor for each KV cache group in every step: from the tables of all requests (second
runner) or from the host (first). Here these tensors are parts of one, and one launch shifts all
rows in place, between vLLM's filling and the attention. Captured graphs read these addresses.
Layers whose blocks have another size have shorter rows, and a launch of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload


class DeviceTables(Protocol):
    """What attention kernels read that know nothing of skips; see `ShiftedTables`."""

    tables: list[torch.Tensor]
    lens: torch.Tensor
    skips: torch.Tensor
    no_skips: torch.Tensor
    max_lens: npt.NDArray[np.int32] | None
    replays: bool

    def place(self, layer: int) -> int: ...

    def follow(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        step: Step,
        host_lens: npt.NDArray[np.int32] | None,
    ) -> None: ...

    def describe(self, common: Any, layer: int) -> None: ...

    def complete(self, metadata: Any, common: Any, layer: int) -> None: ...

    def warm_up(self) -> None: ...

    def forget_step(self) -> None: ...


class ShiftedTables:
    """Block tables and lengths of every layer of this worker, without the blocks that were skipped.

    `tables` takes the place of vLLM's own tensors of the same size, so this adds only two tensors
    of `[L, R_max]` integers to the device's memory. That matters, because vLLM profiles its memory
    before any table exists: 80 layers, 1024 requests of 131072 tokens and blocks of 16 tokens have
    2.5 GiB of tables.

    Attributes:
        layers: the numbers of this pipeline stage's layers that evict: L of them.
        tables: L tables `[R_max, M]` int32. lens: `[L, R_max]` int32.
        max_lens: `[L]` on the host, the longest sequence that each layer attends to in this step;
            None where the host does not know it.
        skips: `[L, R_max]` int32, tokens that each row leaves out.
        no_skips: `[R_max]` int32, zeros: the skips of requests within these tables.
        replays: whether the step replays a single graph, so that its metadata is not read.

    Args:
        max_num_reqs: R_max.
        shapes: M, the entries of a request's block table, and the tokens of a block, of each layer.
        device: the device of the attention.
    """

    def __init__(
        self,
        layers: slice,
        max_num_reqs: int,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.layers = layers
        num_layers = layers.stop - layers.start
        assert len(shapes) == num_layers, (shapes, layers)
        self.max_lens: npt.NDArray[np.int32] | None = None
        self.replays = False
        # Each layer's part begins at a multiple of 16 bytes, as a tensor of its own would;
        # otherwise Triton compiles other kernels for it.
        rows = -(-max_num_reqs // 4) * 4
        # Consecutive layers of one shape: the first one's place, their tables, tokens of a block.
        self._parts: list[tuple[int, torch.Tensor, int]] = []
        with torch.inference_mode(False):  # as vLLM's buffers, which these tensors replace
            entries = rows * sum(width for width, _ in shapes)
            rest = torch.zeros(entries, dtype=torch.int32, device=device)
            first = 0
            for (width, block_size), group in groupby(shapes):
                count = len(list(group))
                part, rest = rest.split((count * rows * width, len(rest) - count * rows * width))
                tables = part.view(count, rows, width)[:, :max_num_reqs]
                self._parts.append((first, tables, block_size))
                first += count
            self.lens, self.skips = (
                torch.zeros(num_layers, rows, dtype=torch.int32, device=device)[:, :max_num_reqs]
                for _ in range(2)
            )
            self.no_skips = torch.zeros_like(self.lens[0])
        self.tables = [table for _, tables, _ in self._parts for table in tables]

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
        """Shift the tables of a step; arguments as of `update`.

        Args:
            query_starts: `[R + 1]` int32, where the queries of each request begin.
        """
        if (layout := step.layout) is None:
            self.update(seq_lens, step.skips, host_lens)
        else:
            self.update(seq_lens, layout.skips, host_lens, layout.seq_lens)

    def update(
        self,
        seq_lens: torch.Tensor,
        skips: npt.NDArray[np.int32],
        host_lens: npt.NDArray[np.int32] | None,
        layer_lens: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Shift the step's tables, which vLLM has just filled, and write the step's lengths.

        Must be called once after each filling: a second call would shift the rows again.

        Args:
            seq_lens: `[R]` int32, 0 in the padding rows of a captured batch.
            skips: `[layers that evict, <= R]` int32 on the host; the other requests have skipped
                nothing.
            host_lens: `[<= R]`, the host's `seq_lens` of the requests with skips; None in a step
                without real requests, which has no skips.
            layer_lens: `[layers that evict, R]`, where the sequences of `host_lens` end in each
                layer, if layers compute different tokens; at most `host_lens`.
        """
        from vllm_pyramid.kernels.triton.tables import effective_lens, shift_block_tables_

        skips = skips[self.layers]
        num_rows, num_skips = seq_lens.shape[0], skips.shape[1]
        device_skips = self.skips[:, :num_rows]
        device_skips[:, num_skips:] = 0
        device_skips[:, :num_skips].copy_(upload(skips, seq_lens.device))
        longest = 0
        self.max_lens = None
        if host_lens is not None:
            longest = int(host_lens.max())
            self.max_lens = (host_lens - skips).max(axis=1)
        for first, tables, block_size in self._parts:
            shift_block_tables_(
                tables[:, :num_rows],
                device_skips[first : first + len(tables)],
                block_size,
                num_columns=-(-longest // block_size),
            )
        if layer_lens is None:
            effective_lens(self.lens[:, :num_rows], seq_lens, device_skips)
            return
        if host_lens is None or len(host_lens) != num_rows:
            raise RuntimeError(
                f"a step in which layers compute different tokens has {num_rows} rows, some of "
                "padding; report this"
            )
        layer_lens = layer_lens[self.layers] - skips
        self.max_lens = layer_lens.max(axis=1)
        # Only the device may know how many drafts of a decoding request were accepted.
        differences = upload(layer_lens - host_lens, seq_lens.device)
        torch.add(seq_lens, differences, out=self.lens[:, :num_rows])

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
        """Launch all kernels, with one request that has no tokens."""
        self.update(self.no_skips[:1], np.zeros((self.layers.stop, 1), np.int32), None)

    def forget_step(self) -> None:
        """Forget the last step before graphs are captured, on tables that vLLM has cleared."""
        self.max_lens = None
        self.lens.fill_(1)
