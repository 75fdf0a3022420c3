# SPDX-License-Identifier: Apache-2.0
"""A worker's host memory for bundles that the scheduler stores there and loads again.

    slots    [S, L, B] bytes       S slots, L blocks of each (a layer's each), B bytes of a block
    pages    [P, B] bytes          all blocks of the device, of one memory for all layers

What a method keeps beside each block (`CacheHooks.block_extras`) is copied with the block:

    slots    [S, L, B + C] bytes   C bytes behind those of the block
    extras   [P, C] bytes          one memory a method

A worker has the layers of its pipeline stage, and takes their blocks out of each order.

On a GPU the memory is pinned and the device addresses it, so the same two operations, launched on
the step's own stream, copy in the order in which the scheduler gave slots and blocks away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.compat.side_channel import HostCopies, HostCopy, HostFill
from vllm_pyramid.kv_cache.spec import HostSlots, LayerKVCacheSpec
from vllm_pyramid.step.hooks import HostMemory
from vllm_pyramid.step.upload import upload
from vllm_pyramid.worker.file_writer import FileWriter

_WORD = torch.int64  # blocks are copied in larger units than bytes where these fit
# Bytes of memory in which blocks wait to be written to files, at most.
_MOST_WAITING = 1 << 30


def waiting_bytes(num_bytes: int) -> int:
    """Return the bytes of memory in which blocks wait for files, beside slots of `num_bytes`."""
    return min(_MOST_WAITING, num_bytes)


class HostPool:
    """The slots of one worker.

    Args:
        num_bytes: of host memory at most, of the workers of all pipeline stages together.
        specs: of this worker's layers, all of which evict.
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
    ) -> None:
        slots = HostSlots.of(num_bytes, specs, extra_bytes)
        self._part, self._layers = part, slice(None)  # a state has more blocks than layers
        if len(specs) < specs[0].num_layers:
            self._layers = slice(specs[0].layer_idx, specs[-1].layer_idx + 1)
        self._memory = allocate(slots.count * slots.num_bytes)
        self.slots = self._memory.bytes.view(slots.count, len(specs), -1)
        self._waiting = allocate(waiting_bytes(self.slots.nbytes)) if has_files else None
        self._page_bytes = specs[0].page_size_bytes
        self._memories: list[torch.Tensor] = []
        self.writer: FileWriter | None = None

    def bind(
        self,
        kv_caches: Sequence[torch.Tensor],
        num_blocks: int,
        extras: Iterable[torch.Tensor] = (),
    ) -> None:
        """Take the device's blocks, which have been allocated, perhaps again.

        Args:
            extras: `[num_blocks, ...]` of each method that keeps something beside blocks.

        Raises:
            RuntimeError: layers have memories of their own, or blocks of other sizes.
        """
        self._memories = [pages_of(kv_caches, num_blocks, self._page_bytes, "--kv-host-cache")]
        for memory in extras:
            self._memories.append(memory.view(torch.uint8).view(num_blocks, -1))
        if sum(memory.shape[1] for memory in self._memories) != self.slots.shape[-1]:
            raise RuntimeError(
                f"the KV cache has blocks of {[memory.shape[1] for memory in self._memories]} "
                f"bytes, those beside them included, and a slot of the host cache has room for "
                f"{self.slots.shape[-1]}: leave --kv-host-cache out, and report this"
            )

    def store(self, copies: HostCopies) -> None:
        """Copy to the host what the step's other copies, and the step itself, may overwrite."""
        if copies.files is not None:
            if self.writer is None:
                assert self._waiting is not None, "the scheduler orders files without a folder"
                self.writer = FileWriter(self._waiting, self._part, self._layers)
            self.writer.put(copies.files, self._words)
        of_device = iter(self._of([copy for copy in copies.stored if isinstance(copy, HostCopy)]))
        for copy in copies.stored:  # in order: a slot may get something twice
            if isinstance(copy, HostFill):
                content = bytearray(copy.contents[self._part])
                filled = upload(np.frombuffer(content, np.uint8), self.slots.device)
                slot = self.slots[copy.slot].view(-1)[: len(content)]
                slot.copy_(filled)
                continue
            blocks, slot = next(of_device)
            for memory, part in self._parts_of(slot):
                _copy_out(memory, blocks, part)

    def load(self, copies: Sequence[HostCopy], output: SchedulerOutput) -> None:
        """Copy from the host what the step's requests begin with.

        The blocks are removed from those that vLLM zeroes afterwards.
        """
        for blocks, slot in self._of(copies):
            for memory, part in self._parts_of(slot):
                memory.index_copy_(0, blocks, part)
        if copies and (to_zero := output.new_block_ids_to_zero):
            filled = {block for copy in copies for block in copy.blocks[self._layers]}
            output.new_block_ids_to_zero = [block for block in to_zero if block not in filled]

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

    @property
    def _words(self) -> list[torch.Tensor]:
        """Return the device's memories, `[P, words]` each."""
        assert self._memories, "bind was not called"
        word = self._word
        return [memory.view(word) for memory in self._memories]

    @property
    def _word(self) -> torch.dtype:
        """Return the unit of the copies: bytes, where a larger one does not fit."""
        sizes = [memory.shape[1] for memory in self._memories]
        return torch.uint8 if any(size % _WORD.itemsize for size in sizes) else _WORD

    def _parts_of(self, slot: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each memory with its part of `[n, words]` blocks of a slot."""
        memories = self._words
        return zip(memories, slot.split([one.shape[1] for one in memories], 1), strict=True)

    def _of(self, copies: Sequence[HostCopy]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each copy, its `[n]` block ids on the device and its `[n, words]` slot."""
        if not copies:
            return []
        assert self._memories, "bind was not called"
        own = [copy.blocks[self._layers] for copy in copies]
        ids = np.array([block for blocks in own for block in blocks], np.int64)
        of_copies = upload(ids, self._memories[0].device).split([len(blocks) for blocks in own])
        slots = self.slots.view(self._word)
        return [
            (blocks, slots[copy.slot, : len(blocks)])
            for blocks, copy in zip(of_copies, copies, strict=True)
        ]


def pages_of(
    kv_caches: Sequence[torch.Tensor], num_blocks: int, page_bytes: int, flag: str
) -> torch.Tensor:
    """Return the blocks of all layers, `[num_blocks, page_bytes]` bytes of one memory.

    Args:
        kv_caches: of the layers. flag: what needs the blocks.

    Raises:
        RuntimeError: layers have memories of their own, or blocks of other sizes.
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


def _copy_out(memory: torch.Tensor, blocks: torch.Tensor, slot: torch.Tensor) -> None:
    torch.index_select(memory, 0, blocks, out=slot)
