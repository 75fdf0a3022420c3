# SPDX-License-Identifier: Apache-2.0
"""A thread that writes bundles of the host cache to files, behind the steps."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_pyramid.compat.side_channel import FileOrders, FileSave
from vllm_pyramid.kv_cache.bundle_file import part_path, write_file
from vllm_pyramid.step.upload import upload

logger = init_logger(f"vllm.{__name__}")

_PATIENCE = 30.0  # seconds for what waits when the process ends


class FileWriter:
    """Files that are to be written, one after the other.

    Args:
        most_waiting: bytes that may wait; what comes on top of them is not written. The files of
            the latest orders are the ones that miss, so a prompt's beginning is written first.
        part: the number of this worker, which writes its part of each bundle.
        layers: which blocks of a bundle are those of this worker's layers.
    """

    def __init__(self, most_waiting: int, part: int = 0, layers: slice = slice(None)) -> None:
        self._most, self._waiting, self._failed = most_waiting, 0, 0
        self._part, self._layers = part, layers
        self._told = False
        self._counts = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-host-cache-dir", daemon=True)
        self._thread.start()
        # Forked processes run no `atexit` functions, but they run these.
        Finalize(None, self.finish, (_PATIENCE,), exitpriority=10)

    def put(self, orders: FileOrders, memories: Sequence[torch.Tensor]) -> None:
        """Copy the blocks now, and carry the orders out later.

        Args:
            memories: `[P, words]` each, of all blocks of the device; a file has a block's parts of
                all of them, and then the next block's.
        """
        for path in orders.removed:
            self._queue.put(partial(_remove, part_path(path, self._part)))
        size = sum(one.shape[1] * one.element_size() for one in memories)
        saves: list[FileSave] = []
        with self._counts:
            for save in orders.saved:
                num_bytes = len(save.blocks[self._layers]) * size
                if self._waiting + num_bytes > self._most:
                    self._failed += len(orders.saved) - len(saves)
                    break
                self._waiting += num_bytes
                saves.append(save)
        if saves:
            contents, ready = _copy_of(memories, [save.blocks[self._layers] for save in saves])
            for save, content in zip(saves, contents, strict=True):
                self._queue.put(partial(self._write, save, content, ready))

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

    def _write(self, save: FileSave, content: torch.Tensor, ready: Callable[[], None]) -> None:
        problem: Exception | None = None
        path = part_path(save.path, self._part)
        try:
            ready()
            write_file(path, save.begins[self._part], content.view(torch.uint8).numpy())
        except Exception as error:
            problem = error
        with self._counts:
            self._waiting -= content.nbytes
            self._failed += problem is not None
        if problem is not None and not self._told:
            self._told = True
            logger.warning("kv-host-cache-dir: %s was not written: %r", path, problem)


def _copy_of(
    memories: Sequence[torch.Tensor], blocks: Sequence[Sequence[int]]
) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
    """Return the content of blocks, in host memory once the returned function was called."""
    ids = np.array([block for of_one in blocks for block in of_one], np.int64)
    device = memories[0].device
    chosen = upload(ids, device)
    copies = [memory.index_select(0, chosen) for memory in memories]
    copy = torch.cat(copies, 1) if len(copies) > 1 else copies[0]
    counts = [len(of_one) for of_one in blocks]
    if device.type == "cpu":
        return [part.view(-1) for part in copy.split(counts)], lambda: None
    pinned = torch.empty(copy.shape, dtype=copy.dtype, pin_memory=True)
    pinned.copy_(copy, non_blocking=True)
    event = torch.Event(device)
    event.record()
    return [part.view(-1) for part in pinned.split(counts)], event.synchronize


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
