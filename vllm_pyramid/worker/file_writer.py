# SPDX-License-Identifier: Apache-2.0
"""A thread that writes bundles of the host cache to files, behind the steps.

    a step     blocks of the device -> a part of the reserved memory (`block_transfer.py`)
    a thread   waits for the copy, writes the file, gives the part back

The device writes into the reserved memory itself, so a step takes no memory of either.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize

import torch
from vllm.logger import init_logger

from vllm_pyramid.compat.side_channel import FileOrders, FileSave
from vllm_pyramid.kv_cache.bundle_file import part_path, write_file
from vllm_pyramid.kv_cache.old_files import unlink
from vllm_pyramid.step.hooks import HostMemory
from vllm_pyramid.worker.block_transfer import BlocksOnHost, BlockTransfer

logger = init_logger(f"vllm.{__name__}")

_PATIENCE = 30.0  # seconds for what waits when the process ends


class Ring:
    """Parts of a memory, which are given back in the order in which they were taken."""

    def __init__(self, size: int) -> None:
        self._size, self._head = size, 0
        self._starts: deque[int] = deque()  # of parts that are taken

    def take(self, size: int) -> int | None:
        """Return where a new part begins; None if there is no room for it in one piece."""
        if not self._starts:
            self._head = 0
        tail = self._starts[0] if self._starts else 0
        start: int | None = None
        if not self._starts or self._head > tail:
            if self._size - self._head >= size:
                start = self._head
            elif self._starts and tail >= size:
                start = 0
        elif tail - self._head >= size:
            start = self._head
        if start is not None:
            self._head = start + size
            self._starts.append(start)
        return start

    def give_back(self) -> None:
        """Give the part back that was taken first."""
        self._starts.popleft()


class FileWriter:
    """Files that are to be written, one after the other.

    Args:
        memory: for the bytes that wait; what does not fit into it is not written. The files of
            the latest orders are the ones that miss, so a prompt's beginning is written first.
        part: the number of this worker, which writes its part of each bundle.
        layers: which blocks of a bundle are those of this worker's layers.
        transfer: copies blocks; a file has a block's parts of all memories, and then the next
            block's.
    """

    def __init__(
        self, memory: HostMemory, part: int, layers: slice, transfer: BlockTransfer
    ) -> None:
        self._memory, self._ring, self._failed = memory, Ring(memory.host.nbytes), 0
        self._transfer = transfer
        self._part, self._layers = part, layers
        self._told = False
        self._counts = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-host-cache-dir", daemon=True)
        self._thread.start()
        # Forked processes run no `atexit` functions, but they run these.
        Finalize(None, self.finish, (_PATIENCE,), exitpriority=10)

    def put(self, orders: FileOrders) -> None:
        """Copy the blocks now, and carry the orders out later."""
        for path in orders.removed:
            self._queue.put(partial(unlink, part_path(path, self._part)))
        size = self._transfer.row_bytes
        saves: list[tuple[FileSave, slice]] = []
        with self._counts:
            for save in orders.saved:
                num_bytes = len(save.blocks[self._layers]) * size
                if (start := self._ring.take(num_bytes)) is None:
                    self._failed += len(orders.saved) - len(saves)
                    break
                saves.append((save, slice(start, start + num_bytes)))
        if saves:
            ready = self._copy(saves)
            for save, place in saves:
                self._queue.put(partial(self._write, save, place, ready))

    def _copy(self, saves: Sequence[tuple[FileSave, slice]]) -> Callable[[], None]:
        """Copy blocks to their places in the memory; the returned function waits for it."""
        copies = [BlocksOnHost(save.blocks[self._layers], place.start) for save, place in saves]
        self._transfer.copy(self._memory, copies, to_host=True)
        device = self._memory.bytes.device
        if device.type == "cpu":
            return lambda: None
        event = torch.Event(device)
        event.record()
        return event.synchronize

    def take_failed(self) -> int:
        """Return how many files could not be written since the last call."""
        with self._counts:
            failed, self._failed = self._failed, 0
        return failed

    def finish(self, timeout: float | None = None) -> None:
        """Wait until everything that was ordered is done; nothing can be ordered afterwards."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _write(self, save: FileSave, place: slice, ready: Callable[[], None]) -> None:
        problem: Exception | None = None
        path = part_path(save.path, self._part)
        try:
            ready()
            write_file(path, save.begins[self._part], self._memory.host[place].numpy())
        except Exception as error:
            problem = error
        with self._counts:
            self._ring.give_back()
            self._failed += problem is not None
        if problem is not None and not self._told:
            self._told = True
            logger.warning("kv-host-cache-dir: %s was not written: %r", path, problem)
