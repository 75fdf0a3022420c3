# SPDX-License-Identifier: Apache-2.0
"""A worker's host memory for bundles that the scheduler stores there and loads again.

    slots    [S, L, B] bytes       S slots, L blocks of each (a layer's each), B bytes of a block
    pages    [P, B] bytes          all blocks of the device, of one memory for all layers

What a method keeps beside each block (`CacheHooks.block_extras`) is copied with the block:

    slots    [S, L, B + C] bytes   C bytes behind those of the block
    extras   [P, C] bytes          one memory a method

A worker has the layers of its pipeline stage, and takes their blocks out of each order.

On a GPU the memory is pinned and the device addresses it. Copies run in the order in which the
scheduler gave slots and blocks away (`block_transfer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.compat.side_channel import HostCopies, HostCopy
from vllm_pyramid.kv_cache.spec import HostSlots, LayerKVCacheSpec
from vllm_pyramid.step.hooks import CopyStream, HostMemory
from vllm_pyramid.step.upload import upload
from vllm_pyramid.worker.block_transfer import BlocksOnHost, BlockTransfer
from vllm_pyramid.worker.file_writer import FileWriter

# Bytes of memory in which blocks wait to be written to files, at most.
_MOST_WAITING = 1 << 30


def waiting_bytes(num_bytes: int) -> int:
    """Return the bytes of memory in which blocks wait for files, beside slots of `num_bytes`."""
    return min(_MOST_WAITING, num_bytes)


class HostPool:
    """The slots of one worker.

    Args:
        num_bytes: of host memory at most, of the workers of all pipeline stages together.
        allocate: makes host memory that the device addresses.
        part: the number of this worker among all ranks, where bundles are in files.
        extra_bytes: beside each block, of all methods together.
        has_files: whether bundles are written to files, for which memory is reserved, too.

    Raises:
        ValueError: `num_bytes` hold no slot.
        RuntimeError: the memory cannot be had.
    """

    def __init__(
        self,
        num_bytes: int,
        specs: Sequence[LayerKVCacheSpec],
        allocate: Callable[[int], HostMemory],
        part: int = 0,
        extra_bytes: int = 0,
        *,
        has_files: bool = True,
        stream: CopyStream | None = None,
    ) -> None:
        slots = HostSlots.of(num_bytes, specs, extra_bytes)
        self._part, self._layers = part, slice(None)  # a state has more blocks than layers
        if len(specs) < specs[0].num_layers:
            self._layers = slice(specs[0].layer_idx, specs[-1].layer_idx + 1)
        self._memory = allocate(slots.count * slots.num_bytes)
        self.slots = self._memory.bytes.view(slots.count, len(specs), -1)
        self._waiting = allocate(waiting_bytes(self.slots.nbytes)) if has_files else None
        self._page_bytes = specs[0].page_size_bytes
        self.transfer = BlockTransfer(stream)
        self.writer: FileWriter | None = None

    def bind(
        self,
        kv_caches: Sequence[torch.Tensor],
        num_blocks: int,
        extras: Iterable[torch.Tensor] = (),
    ) -> None:
        """Take the device's blocks, which have been allocated, perhaps again.

        `extras` are `[num_blocks, ...]` of each method that keeps something beside blocks.
        RuntimeError: as `pages_of`.
        """
        memories = [pages_of(kv_caches, num_blocks, self._page_bytes, "--kv-host-cache")]
        memories += [memory.view(torch.uint8).view(num_blocks, -1) for memory in extras]
        if sum(memory.shape[1] for memory in memories) != self.slots.shape[-1]:
            raise RuntimeError(
                f"the KV cache has blocks of {[memory.shape[1] for memory in memories]} "
                f"bytes, those beside them included, and a slot of the host cache has room for "
                f"{self.slots.shape[-1]}: leave --kv-host-cache out, and report this"
            )
        self.transfer.bind(memories)

    def store(self, copies: HostCopies) -> None:
        """Copy to the host what the step's other copies, and the step itself, may overwrite."""
        if copies.files is not None:
            if self.writer is None:
                assert self._waiting is not None, "the scheduler orders files without a folder"
                self.writer = FileWriter(self._waiting, self._part, self._layers, self.transfer)
            self.writer.put(copies.files)
        run: list[HostCopy] = []
        for copy in copies.stored:  # in order: a slot may get something twice
            if isinstance(copy, HostCopy):
                run.append(copy)
                continue
            self._copy(run, to_host=True)
            run = []
            content = bytearray(copy.contents[self._part])
            filled = upload(np.frombuffer(content, np.uint8), self.slots.device)
            self.slots[copy.slot].view(-1)[: len(content)].copy_(filled)
        self._copy(run, to_host=True)

    def load(self, copies: Sequence[HostCopy], output: SchedulerOutput) -> None:
        """Copy from the host what the step's requests begin with.

        The blocks are removed from those that vLLM zeroes afterwards.
        """
        self._copy(copies, to_host=False)
        if copies and (to_zero := output.new_block_ids_to_zero):
            filled = {block for copy in copies for block in copy.blocks[self._layers]}
            output.new_block_ids_to_zero = [block for block in to_zero if block not in filled]

    def _copy(self, copies: Sequence[HostCopy], *, to_host: bool) -> None:
        size = self.slots[0].nbytes
        rows = [BlocksOnHost(copy.blocks[self._layers], copy.slot * size) for copy in copies]
        self.transfer.copy(self._memory, rows, to_host=to_host)

    def take_unwritten(self) -> int:
        """Return how many files could not be written since the last call."""
        return 0 if self.writer is None else self.writer.take_failed()

    def release(self) -> None:
        """Give the memory back, once the device has finished its work and files are written."""
        if self.writer is not None:
            self.writer.finish()
        self._memory.release()
        if self._waiting is not None:
            self._waiting.release()


def pages_of(
    kv_caches: Sequence[torch.Tensor], num_blocks: int, page_bytes: int, flag: str
) -> torch.Tensor:
    """Return the blocks of all layers, `[num_blocks, page_bytes]` bytes of one memory.

    RuntimeError, which names `flag`: layers have memories of their own, or blocks of other sizes.
    """
    storages = {cache.untyped_storage().data_ptr(): cache for cache in kv_caches}
    found = [_block_bytes(cache, num_blocks) for cache in storages.values()]
    if found != [page_bytes]:
        raise RuntimeError(
            f"the KV cache has memories with blocks of {found} bytes (None: in several places), "
            f"and {flag} copies blocks of {page_bytes} bytes of one memory: leave it out, and "
            "report this"
        )
    (cache,) = storages.values()
    pages = torch.empty(0, dtype=torch.uint8, device=cache.device)
    pages.set_(cache.untyped_storage())
    return pages.view(num_blocks, page_bytes)


def _block_bytes(cache: torch.Tensor, num_blocks: int) -> int | None:
    """Return the bytes of a block in the memory of a layer's cache; None if they lie apart."""
    kernel_blocks, rest = divmod(cache.shape[0], num_blocks)  # a block may be several of a kernel's
    size = cache.stride(0) * cache.element_size() * kernel_blocks
    whole = not rest and cache.untyped_storage().nbytes() == num_blocks * size
    return size if whole else None
