# SPDX-License-Identifier: Apache-2.0
"""Random lives of bundles over the device, host memory and files, with the workers' own copies."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from tests.worker.test_host_pool import LAYERS, specs
from vllm_pyramid.compat.side_channel import HostFill
from vllm_pyramid.kv_cache import bundle_file
from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.kv_cache.host_files import HostFiles
from vllm_pyramid.step.hooks import HostMemory
from vllm_pyramid.worker.host_pool import HostPool

BLOCKS, SLOTS, RANKS = 46, 8, 2
DOCUMENTS, LONGEST = 8, 7  # bundles
SUITE = 4000  # operations
HAPPENINGS = (
    *("begun", "waits", "aborted", "preempted", "ended", "killed", "other weights", "reset"),
    *("loaded", "filled", "states resumed", "host evictions", "dropped", "file evictions"),
    *("damaged", "unwritten", "slow", "full"),
)


def name_of(document: int, index: int) -> BlockHash:
    """Return the name of a bundle; the second half of the documents begin as the first half."""
    half = DOCUMENTS // 2
    return BlockHash(
        sha256(f"{document % half if index < 3 else document} {index}".encode()).digest()
    )


@lru_cache(100_000)
def tag(name: bytes, block: int, rank: int, weights: int, words: int) -> np.ndarray:
    """Return what a block of a bundle must hold in the memory of a rank."""
    digest = sha256(name + f" {block} {rank} {weights}".encode()).digest()
    return np.resize(np.frombuffer(digest, np.int64), words)


class FullDisk:
    """A file, open to be written, on a disk that is full after 700 bytes."""

    def __init__(self, file: Any) -> None:
        self.file, self.left = file, 700

    def write(self, data: memoryview) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written: int = self.file.write(data[: self.left])
        self.left -= written
        return written


@dataclass
class Holder:
    """A request, or one that resumes or leaves a state (`is_state`): blocks and their names."""

    bundles: list[BlockBundle] = field(default_factory=list)
    state: tuple[BlockHash, list[KVCacheBlock], bool] | None = None
    computed: list[tuple[BlockHash, list[KVCacheBlock]]] = field(default_factory=list)

    def places(self) -> list[tuple[BlockHash, Any]]:
        """Return names and blocks of all that it reads."""
        found: list[tuple[BlockHash, Any]] = [(b.hash, b.blocks) for b in self.bundles]
        return found + ([self.state[:2]] if self.state else [])


class Tiers:
    """An engine's bundles without its requests' tables, and two ranks' workers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.seen = folder, random.Random(seed), Counter[str]()
        self.weights, self.disk, self.gate = 0, "good", threading.Event()
        self.dead: set[threading.Thread] = set()
        self.gate.set()
        self.begin()

    def begin(self) -> None:
        """Start an engine, which finds the folder of the one before."""
        of = specs(torch.float32)
        page, self.holders = of[0].page_size_bytes, list[Holder]()
        self.words = page // 8
        parts = [slice(None)] * RANKS
        size = SLOTS * LAYERS * page
        limit = 30 * RANKS * LAYERS * page  # some twenty bundles, with heads and checksums
        self.files = HostFiles(
            str(self.folder), f"weights{self.weights}", page, limit, size, 1.0, parts
        )
        self.limit = limit
        self.host = HostCache(SLOTS, LAYERS, self.files)
        self.pool = BundlePool(BLOCKS, False, 16)
        self.pool.tier = self.host
        self.workers, self.pages = [], []
        for rank in range(RANKS):
            worker = HostPool(size, of, HostMemory, rank)
            memory = torch.zeros(BLOCKS * page, dtype=torch.uint8)
            worker.bind([memory.view(BLOCKS, -1)], BLOCKS)
            self.workers.append(worker)
            self.pages.append(memory.view(torch.int64).view(BLOCKS, -1).numpy())

    # What happens -----------------------------------------------------------------------------

    def request(self) -> None:
        """A request looks for its prompt; it waits, is aborted, or begins with what it finds.

        Before, it finds something else, which is not what it begins with.
        """
        document, length = self.random.randrange(DOCUMENTS), self.random.randint(1, LONGEST)
        names = [name_of(document, index) for index in range(length)]
        on_device = self.pool.longest_prefix(names)
        behind = names[on_device:]
        other = [name_of(self.random.randrange(DOCUMENTS), index) for index in range(LONGEST)]
        other = other[: self.host.longest_prefix(other)]
        found = behind[: self.host.longest_prefix(behind)]
        self.host.pin(other)
        idle = len(self.pool.idle_bundles(names[:on_device]))
        if (len(behind) + idle) * LAYERS > self.pool.get_num_free_blocks():
            self.seen["waits"] += 1
            return
        if self.random.random() < 0.2:
            self.seen["aborted"] += 1  # while it waits: what was read for it stays in the host
            return
        bundles, _ = self.pool.adopt(names[:on_device])
        self.host.pin(found)
        new = self.pool.get_new_blocks(len(behind) * LAYERS)
        holder = Holder(bundles)
        for index, name in enumerate(behind):
            blocks = new[index * LAYERS : (index + 1) * LAYERS]
            if index < len(found):
                self.host.load(name, blocks)
            else:
                holder.computed.append((name, blocks))
            bundles.append(self.pool.publish(name, blocks))
        self.seen["loaded"] += len(found)
        self.seen["begun"] += 1
        self.holders.append(holder)

    def state(self) -> None:
        """A turn ends with a state of more blocks than a slot has, or goes on with one."""
        document = self.random.randrange(DOCUMENTS // 2)
        name = BlockHash(name_of(document, 0) + b"@key")
        count = LAYERS + 1 + document
        if self.pool.get_num_free_blocks() < count:
            return
        if bundle := self.pool.bundles.get(name):
            self.check(name, bundle.blocks)
            self.pool.touch_bundle(name)
        elif self.host.longest_prefix([name]):
            assert self.host.origin(name) == "who evicted"
            self.host.pin([name])
            blocks = self.pool.get_new_blocks(count)
            self.host.load(name, blocks)
            self.holders.append(Holder(state=(name, blocks, False)))
            self.seen["states resumed"] += 1
        elif not any(holder.state and holder.state[0] == name for holder in self.holders):
            blocks = self.pool.get_new_blocks(count)
            self.holders.append(Holder(state=(name, blocks, True), computed=[(name, blocks)]))

    def end(self, what: str = "ended") -> None:
        """A request gives its blocks back, at its end or where it is preempted."""
        if not self.holders:
            return
        self.step()
        holder = self.holders.pop(self.random.randrange(len(self.holders)))
        self.pool.release(holder.bundles)
        if holder.state is not None:
            name, blocks, leaves = holder.state
            if not (leaves and self.pool.add_idle(name, blocks, "who evicted")):
                self.pool.free_blocks(blocks)
        self.seen[what] += 1

    def kill(self) -> None:
        """Kill the engine, damage some files, and start it again, perhaps with other weights."""
        self.files.close()
        for worker in self.workers:
            if worker.writer is None:
                continue
            self.dead.add(worker.writer._thread)
            with_nothing_left(worker.writer)
        self.gate.set()
        for worker in self.workers:
            if worker.writer is not None:
                worker.writer.finish()
        self.dead.clear()
        if self.disk == "slow":
            self.gate.clear()
        for path in sorted(self.folder.rglob("*.kv*")):
            if self.random.random() < 0.15:
                data = bytearray(path.read_bytes())
                at = self.random.randrange(len(data))
                path.write_bytes(data[:at] if at % 2 else data[:at] + b"?" + data[at + 1 :])
            elif self.random.random() < 0.03:
                path.rename(f"{path}.part")  # as if the process had ended before it was whole
        if self.random.random() < 0.2:
            self.weights += 1
            self.seen["other weights"] += 1
        self.count_lives()
        self.begin()
        self.seen["killed"] += 1

    def reset(self) -> None:
        """Load other weights while the engine runs: nothing that was computed is found again."""
        self.step()
        while self.holders:
            self.end()
        assert self.pool.reset_prefix_cache()
        self.host.clear()
        self.weights += 1
        self.seen["reset"] += 1

    def change_disk(self) -> None:
        self.disk = self.random.choice(["good", "good", "slow", "full"])
        self.seen[self.disk] += 1
        self.gate.set() if self.disk != "slow" else self.gate.clear()

    def step(self) -> None:
        """Do what a step does, in every worker, and look at all cells that requests read."""
        copies = self.host.take_message()
        output: Any = SimpleNamespace(new_block_ids_to_zero=None)
        for worker in self.workers if copies is not None else ():
            received = pickle.loads(pickle.dumps(copies))
            worker.store(received)
            worker.load(received.loaded, output)
        if copies is not None:
            self.seen["filled"] += sum(isinstance(copy, HostFill) for copy in copies.stored)
        for holder in self.holders:
            for name, blocks in holder.computed:
                for index, block in enumerate(blocks):
                    for rank, pages in enumerate(self.pages):
                        pages[block.block_id] = tag(name, index, rank, self.weights, self.words)
            holder.computed = []
            for bundle in holder.bundles:
                bundle.scheduled = True
        for holder in self.holders:
            for name, blocks in holder.places():
                self.check(name, blocks)
        writers = [worker.writer for worker in self.workers]
        self.files.failed_to_write(sum(w.take_failed() for w in writers if w is not None))
        self.check_accounts()

    # What must hold -----------------------------------------------------------------------------

    def check(self, name: BlockHash, blocks: Any) -> None:
        for rank, pages in enumerate(self.pages):
            for index, block in enumerate(blocks):
                expected = tag(name, index, rank, self.weights, self.words)
                assert (pages[block.block_id] == expected).all(), "another bundle's cells"

    def check_accounts(self) -> None:
        """No slot is lost or kept for a step, each block has one place, files are within limits."""
        chunks = self.host._table._manager._policy.chunks
        assert len(chunks) == self.host.used_slots <= SLOTS
        assert all(chunk.ref_cnt == 0 for chunk in chunks.values()), "pinned between steps"
        in_use = {id(b): b for holder in self.holders for b in holder.bundles}
        in_use |= {id(b): b for b in self.pool.bundles.values()}
        owned = [b.block_id for bundle in in_use.values() for b in bundle.blocks]
        owned += [b.block_id for h in self.holders if h.state for b in h.state[1]]
        owned += [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]
        assert sorted(owned) == list(range(1, BLOCKS)), "a block is lost, or has two owners"
        known = sum(self.files._known.values())
        assert self.files.used_bytes == known + self.files._old.bytes <= self.limit

    def count_lives(self) -> None:
        """Add up what the counters of the engine say that ends."""
        host, files = self.host.counters, self.files.counters
        self.seen["host evictions"] += host.evictions
        self.seen["dropped"] += host.dropped
        self.seen["file evictions"] += files.evictions
        self.seen["damaged"] += files.damaged
        self.seen["unwritten"] += files.unwritten

    def finish(self) -> None:
        """End everything: all that is on the disk is known, and a reset removes it."""
        self.disk = "good"
        self.gate.set()
        while self.holders:
            self.end()
        for may_be_there in (True, False):
            self.step()
            for worker in self.workers:
                if worker.writer is not None:
                    worker.writer.finish()
                    worker.writer = None
            found = {str(path).partition(".kv")[0] + ".kv" for path in self.folder.rglob("*.kv*")}
            own = {path for path in found if path.startswith(str(self.files._own))}
            unknown = own - set(self.files._known)
            assert len(unknown) <= self.files._old.number, "a file that is not counted"
            assert may_be_there or not own
            assert self.pool.reset_prefix_cache()
            self.host.clear()
        assert self.pool.get_num_free_blocks() == BLOCKS - 1 and not self.host.used_slots
        self.count_lives()
        self.files.close()

    @contextmanager
    def opened(self, path: str, mode: str, **kwargs: Any) -> Iterator[Any]:
        """Open a file on the disk as it is now; a process that was killed writes nothing."""
        if mode == "xb":
            self.gate.wait()
            if threading.current_thread() in self.dead:
                raise OSError("killed")
        with open(path, mode, **kwargs) as file:
            yield FullDisk(file) if mode == "xb" and self.disk == "full" else file


def with_nothing_left(writer: Any) -> None:
    """Drop what waits to be written."""
    try:
        while True:
            writer._queue.get_nowait()
    except Empty:
        return


def live(folder: Path, operations: int, seed: int) -> Counter[str]:
    """Do random operations, and return what happened how often."""
    tiers = Tiers(folder, seed)
    chances: dict[Any, float] = {
        tiers.request: 40,
        tiers.step: 20,
        tiers.state: 14,
        tiers.end: 18,
        lambda: tiers.end("preempted"): 4,
        tiers.change_disk: 2,
        tiers.kill: 1.2,
        tiers.reset: 0.3,
    }
    with mock.patch.object(bundle_file, "open", tiers.opened, create=True):
        try:
            for do in tiers.random.choices(list(chances), list(chances.values()), k=operations):
                do()
            tiers.finish()
        finally:
            tiers.gate.set()
    return tiers.seen


def test_nothing_wrong_is_read_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    """Some happenings are rare, and some depend on the disk's speed: three lives see them all."""
    seen = Counter[str]()
    for more in range(3):
        folder = tmp_path / str(more)
        folder.mkdir()
        seen += live(folder, SUITE, seed + more)
        if all(seen[happening] for happening in HAPPENINGS):
            return
    raise AssertionError([happening for happening in HAPPENINGS if not seen[happening]])


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        chosen = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
        print(f"{sys.argv[1]} operations, seed {chosen}")
        print(dict(live(Path(made), int(sys.argv[1]), chosen)))
