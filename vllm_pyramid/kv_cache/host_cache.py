# SPDX-License-Identifier: Apache-2.0
"""The host cache: bundles live on in host memory when the device gives their blocks away.

    a step     schedule        the pool dissolves a bundle: a slot is given to it     stored
               schedule        a request begins with bundles of the host              loaded
               worker          stored bundles are copied out, blocks of the device are copied,
                               loaded bundles are copied in, then the step runs

Nothing is copied when it is computed: a bundle costs a copy when the pool is about to reuse its
blocks, and none if the host has it already. One slot takes a block of each layer, so a bundle of a
prefix takes one slot. The base of a session (`session_cache.py`) takes as many as its blocks need.

The order of a step's copies keeps them right: no step writes to a bundle's blocks, so their content
is the one before the step, and slots that are loaded are not given to others before the step has
been scheduled. Every tensor-parallel rank copies its own part of the blocks, by the same message.

With a folder (`host_files.py`) a bundle that is in a file, and not in host memory, gets a slot when
it is looked for, and the step fills the slot from the file's bytes. A step reads `MOST_READ` bytes
and the bundle that passes them: a request that finds more in files waits, first in the queue, and
later steps read on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm_pyramid.compat.offloading import SlotTable
from vllm_pyramid.compat.side_channel import HostCopies, HostCopy, HostFill
from vllm_pyramid.kv_cache.announced_block import AnnouncedBlock
from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.host_files import HostFiles
from vllm_pyramid.kv_cache.tier import Tier

# Bytes of files that a step reads, of all ranks: what running requests wait for, some 70 ms, and
# what a step's message carries in addition to the memory that is reserved.
MOST_READ = 64 << 20


@dataclass(slots=True)
class HostCounters:
    """Counters of the host cache since the start.

    Attributes:
        queries, hits: tokens that requests looked for here when they began (those that they may
            begin with and the device did not have), and tokens that they found.
        stored, loaded: blocks. evictions: bundles.
        dropped: bundles that were not stored, because too many slots were being read.
    """

    queries: int = 0
    hits: int = 0
    stored: int = 0
    loaded: int = 0
    evictions: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One bundle in the host cache.

    `stem` begins its keys: the bundle's hash, with a number if it has several parts, so that parts
    of two bundles of one hash cannot be mixed.
    """

    stem: bytes
    num_blocks: int
    origin: str | None
    announced: AnnouncedBlock | None


class HostCache(Tier):
    """The scheduler's side of the host cache.

    `num_slots` are those of each rank, with `slot_blocks` blocks, one for each layer.
    """

    def __init__(self, num_slots: int, slot_blocks: int, files: HostFiles | None = None) -> None:
        self.num_slots, self.slot_blocks, self.files = num_slots, slot_blocks, files
        self.counters = HostCounters()
        self._table = SlotTable(num_slots)
        self._entries: dict[BlockHash, HostEntry] = {}
        self._names: dict[bytes, BlockHash] = {}  # of entries, by their stems
        self._used = 0  # slots
        self._number = 0
        self._pinned: list[Any] = []
        # In this step: bytes read, and whether files were left for the next one; steps in which a
        # request has waited for it, one after the other.
        self._bytes_read, self._is_cut, self._waits = 0, False, 0
        self._copies = HostCopies([], [])

    @property
    def used_slots(self) -> int:
        """Return how many slots hold something."""
        return self._used

    # Looking up -------------------------------------------------------------------------------

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._entries or (self.files is not None and name in self.files)

    def longest_prefix(self, names: Sequence[BlockHash]) -> int:
        """Return how many of these bundles, from the first one on, are in the host cache.

        Files are read for it, as far as there are slots and the step may read. What is read, here
        or in a later lookup of the step, does not push out what was found.
        """
        entries = self._entries
        found = next((n for n, name in enumerate(names) if name not in entries), len(names))
        if self.files is None:
            return found
        self.pin(names[:found])
        if found == len(names) or names[found] not in self.files:
            return found
        for name in names[found:]:
            if name not in entries and not self._may_read(self.files, name):
                break
            self.pin([name])
            found += 1
        return found

    def must_wait(self) -> bool:
        """Return whether the step has left files for the next one which the last lookup wants.

        Each step that is waited for fills a slot, so none waits for more steps than there are.
        """
        return self._is_cut and self._waits < self.num_slots

    def _may_read(self, files: HostFiles, name: BlockHash) -> bool:
        """Read a bundle's file if the step may read more; as of `_read`."""
        if self._bytes_read < MOST_READ:
            return self._read(files, name)
        self._is_cut |= name in files
        return False

    def _read(self, files: HostFiles, name: BlockHash) -> bool:
        """Give slots to a bundle in a file; return False if it has none that can be read."""
        if (read := files.read(name)) is None:
            return False
        found, contents = read
        self._bytes_read += sum(map(len, contents))
        slots = self._give_slots(name, found.num_blocks, found.origin)
        if slots is None:
            return False
        sizes = [len(content) * self.slot_blocks // found.num_blocks for content in contents]
        self._copies.stored.extend(
            HostFill(
                slot,
                [
                    bytes(content[index * size : (index + 1) * size])
                    for content, size in zip(contents, sizes, strict=True)
                ],
            )
            for index, slot in enumerate(slots)
        )
        return True

    def num_blocks(self, name: BlockHash) -> int:
        """Return the blocks of all layers that a bundle of the host has."""
        return self._entries[name].num_blocks

    def origin(self, name: BlockHash) -> str | None:
        """Return the request that evicted what a bundle of the host holds."""
        return self._entries[name].origin

    # Storing ----------------------------------------------------------------------------------

    def store(self, bundle: BlockBundle) -> None:
        """Copy a bundle to the host; if it is there already, it becomes the last to go."""
        name = bundle.hash
        assert name is not None
        if (entry := self._entries.get(name)) is not None:
            self._table.touch(self._keys(entry))
            return
        slots = self._give_slots(name, len(bundle.blocks), bundle.origin, bundle.announced)
        if slots is not None:
            self._copies.stored.extend(self._copies_of(slots, bundle.blocks))
            self.counters.stored += len(bundle.blocks)

    def _give_slots(
        self,
        name: BlockHash,
        num_blocks: int,
        origin: str | None,
        announced: AnnouncedBlock | None = None,
    ) -> Sequence[int] | None:
        """Make an entry for a bundle that has none; return its slots, None if too few are free."""
        stem: bytes = name
        if num_blocks != self.slot_blocks:
            self._number += 1
            stem += b"#" + self._number.to_bytes(8, "big")
        entry = HostEntry(stem, num_blocks, origin, announced)
        stored = self._table.store(self._keys(entry))
        if stored is None:
            self.counters.dropped += 1
            return None
        self._used += len(stored.slots)
        for gone in stored.evicted:
            self._used -= 1
            if (other := self._names.pop(gone, None)) is not None:
                if (lost := self._entries.pop(other).announced) is not None:
                    lost.left_host()
                self.counters.evictions += 1
        if announced is not None:
            announced.entered_host()
        self._entries[name], self._names[stem] = entry, name
        return stored.slots

    # Loading ----------------------------------------------------------------------------------

    def pin(self, names: Sequence[BlockHash]) -> None:
        """Keep bundles where they are until the step is scheduled, and make them the last to go.

        The request that loads them gets its blocks next, which may store other bundles.
        """
        keys = [key for name in names for key in self._keys(self._entries[name])]
        self._table.touch(keys)
        self._table.pin(keys)
        self._pinned += keys

    def load(self, name: BlockHash, blocks: Sequence[KVCacheBlock]) -> None:
        """Copy a pinned bundle into blocks of the device, layer by layer as it was stored."""
        entry = self._entries[name]
        if len(blocks) != entry.num_blocks:
            raise RuntimeError(
                f"a bundle of {entry.num_blocks} blocks of the host cache is loaded into "
                f"{len(blocks)} blocks; report this"
            )
        keys = self._keys(entry)
        slots = self._table.pin(keys)
        self._pinned += keys
        self._copies.loaded.extend(self._copies_of(slots, blocks))
        self.counters.loaded += len(blocks)

    def count_query(self, tokens: int, found: int) -> None:
        self.counters.queries += tokens
        self.counters.hits += found

    def idle(self, bundle: BlockBundle) -> None:
        """Write a bundle to a file, if there is a folder."""
        if self.files is not None:
            self.files.save(bundle)

    def take_message(self) -> HostCopies | None:
        """Return the copies of the step that has just been scheduled; None if there are none."""
        self._table.unpin(self._pinned)
        self._pinned = []
        self._waits = self._waits + 1 if self._is_cut else 0
        self._bytes_read, self._is_cut = 0, False
        files = None if self.files is None else self.files.take()
        if not self._copies.stored and not self._copies.loaded and files is None:
            return None
        copies, self._copies = self._copies._replace(files=files), HostCopies([], [])
        return copies

    def clear(self) -> None:
        """Forget everything: weights may change, or the device's cache was reset."""
        self._table.unpin(self._pinned)
        self._table.clear()
        self._entries.clear()
        self._names.clear()
        self._pinned, self._copies, self._used = [], HostCopies([], []), 0
        if self.files is not None:
            self.files.clear()

    def _keys(self, entry: HostEntry) -> list[Any]:
        parts = cdiv(entry.num_blocks, self.slot_blocks)
        return [self._table.key_of(entry.stem, part) for part in range(parts)]

    def _copies_of(self, slots: Sequence[int], blocks: Sequence[KVCacheBlock]) -> list[HostCopy]:
        size = self.slot_blocks
        return [
            HostCopy(slot, [block.block_id for block in blocks[part * size : (part + 1) * size]])
            for part, slot in enumerate(slots)
        ]
