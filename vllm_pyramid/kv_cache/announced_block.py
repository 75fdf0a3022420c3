# SPDX-License-Identifier: Apache-2.0
"""A block of a prompt of which routers were told (`announcing_stores.py`), and where it is."""

from __future__ import annotations

from msgspec.structs import replace
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool


class AnnouncedBlock:
    """What was told of a block: vLLM's "block" is all layers' KV of a range of positions, a bundle.

    The pool and the tier below it call this object when the bundle goes elsewhere. `index` is its
    place among the blocks of the event that told of it; `on_device` also covers other KV heads.
    """

    __slots__ = ("_index", "_pool", "_stored", "on_device")

    def __init__(self, pool: BlockPool, stored: BlockStored, index: int) -> None:
        self._pool, self._stored, self._index = pool, stored, index
        self.on_device = True

    def left_device(self) -> None:
        """Tell that the block is no longer in the pool; the bundle of other KV heads may have."""
        if self.on_device:
            self.on_device = False
            self._removed(self._pool.medium)

    def entered_host(self) -> None:
        """Tell that the block is in host memory, with all that the first event told of it."""
        told, index, size = self._stored, self._index, self._stored.block_size
        alone = replace(
            told,
            block_hashes=told.block_hashes[index : index + 1],
            parent_block_hash=told.block_hashes[index - 1] if index else told.parent_block_hash,
            token_ids=told.token_ids[index * size : (index + 1) * size],
            extra_keys=told.extra_keys and told.extra_keys[index : index + 1],
            medium=MEDIUM_CPU,
        )
        self._pool.kv_event_queue.append(alone)

    def left_host(self) -> None:
        """Tell that the block is no longer in host memory."""
        self._removed(MEDIUM_CPU)

    def _removed(self, medium: str | None) -> None:
        hashes = [self._stored.block_hashes[self._index]]
        event = BlockRemoved(hashes, medium, group_idx=self._stored.group_idx)
        self._pool.kv_event_queue.append(event)
