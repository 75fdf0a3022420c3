# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks between the device and host memory, all of a step in one call.

    device    [P, B] bytes, all blocks; [P, C] bytes of each method that keeps something beside them
    host      from some byte on [n, B + C], n blocks, each with what is beside it

A method's part of a row follows the block's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from vllm_pyramid.compat.offloading import copy_batch
from vllm_pyramid.step.hooks import CopyStream, HostMemory

_Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_WORD = torch.int64  # rows are copied in larger units than bytes where these fit


class BlocksOnHost(NamedTuple):
    """Blocks of the device, and the byte of host memory at which their rows begin."""

    blocks: Sequence[int]
    offset: int


class BlockTransfer:
    """The copies of one worker, in the order of the calls.

    On a GPU the copy engines make them, on `stream`. A copy waits for all that was launched before
    it, and what is launched after it waits for the copy; the host waits for neither. On the CPU the
    device's memory is the host's.
    """

    def __init__(self, stream: CopyStream | None = None) -> None:
        self._stream, self._memories = stream, list[torch.Tensor]()
        self._held: deque[tuple[Any, list[_Batch]]] = deque()  # until they have run

    def bind(self, memories: Sequence[torch.Tensor]) -> None:
        """Take the device's memories, `[P, bytes]` each."""
        self._memories = list(memories)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row on the host."""
        assert self._memories, "bind was not called"
        return sum(memory.shape[1] for memory in self._memories)

    def copy(self, host: HostMemory, copies: Sequence[BlocksOnHost], *, to_host: bool) -> None:
        """Copy blocks to the host or back; where two have one target, the last one counts."""
        if not copies:
            return
        if self._stream is None:
            for one in copies:
                self._copy_rows(host, one, to_host)
            return
        ids = list(chain.from_iterable(one.blocks for one in copies))
        targets = [one.offset for one in copies] if to_host else ids
        # The copies of a call run in any order.
        at_once = [copies] if len(set(targets)) == len(targets) else [[one] for one in copies]
        batches = [self._batch(host, part, to_host) for part in at_once]
        mark = self._stream.launch(_copy_batches, batches)
        self._stream.wait(mark)
        while self._held and self._stream.is_done(self._held[0][0]):
            self._held.popleft()
        self._held.append((mark, batches))

    def _copy_rows(self, host: HostMemory, copies: BlocksOnHost, to_host: bool) -> None:
        blocks = torch.from_numpy(np.array(copies.blocks, np.int64))
        widths = [memory.shape[1] for memory in self._memories]
        word = torch.uint8 if any(width % _WORD.itemsize for width in widths) else _WORD
        end = copies.offset + len(blocks) * self.row_bytes
        rows = host.bytes[copies.offset : end].view(word).view(len(blocks), -1)
        parts = rows.split([width // word.itemsize for width in widths], 1)
        for memory, part in zip(self._memories, parts, strict=True):
            if to_host:
                torch.index_select(memory.view(word), 0, blocks, out=part)
            else:
                memory.view(word).index_copy_(0, blocks, part)

    def _batch(self, host: HostMemory, copies: Sequence[BlocksOnHost], to_host: bool) -> _Batch:
        """Return addresses of sources and targets, and bytes: `[n * memories]` int64 each."""
        counts = np.array([len(one.blocks) for one in copies])
        ids = np.concatenate([np.array(one.blocks, np.int64) for one in copies])
        of_call = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat([one.offset for one in copies], counts) + of_call * self.row_bytes
        rows += host.host.data_ptr()
        device, of_host, sizes = [], [], []
        for memory in self._memories:
            width = memory.shape[1]
            device.append(memory.data_ptr() + ids * width)
            of_host.append(rows)
            sizes.append(np.full(len(ids), width))
            rows = rows + width
        there, here, size = (torch.from_numpy(np.concatenate(x)) for x in (device, of_host, sizes))
        return (there, here, size) if to_host else (here, there, size)


def _copy_batches(batches: Sequence[_Batch]) -> None:
    for batch in batches:
        copy_batch(*batch)
