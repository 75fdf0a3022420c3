# SPDX-License-Identifier: Apache-2.0
"""Slots of host memory, given out and evicted by vLLM's own offloading manager; its copies.

The manager knows which key lives in which slot, which slots are being read, and which was used
least recently. Its transfers are asynchronous; ours belong to a step (`kv_cache/host_cache.py`), so
a stored key can be loaded at once. Loaded after start-up, since vLLM imports its connectors along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Stored(NamedTuple):
    """The slot of each key, and the stems (see `key_of`) of the keys that had to go."""

    slots: list[int]
    evicted: list[bytes]


class SlotTable:
    """Which key lives in which of `num_slots` slots; the least recently used key goes first."""

    def __init__(self, num_slots: int) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._base = base
        self._manager = CPUOffloadingManager(num_slots, cache_policy="lru")
        self._hit = base.LookupResult.HIT
        self._context = base.ReqContext("host cache")  # lookups and uses leave nothing in it

    def key_of(self, stem: bytes, part: int = 0) -> Any:
        """Return the key of one part of what `stem` names."""
        return self._base.make_offload_key(stem, part)

    def has(self, key: Any) -> bool:
        """Return whether a key has a slot."""
        return self._manager.lookup(key, self._context) is self._hit

    def store(self, keys: Sequence[Any]) -> Stored | None:
        """Give slots to keys that have none; None if too few slots are free of reads."""
        context = self._base.ReqContext("host cache")
        output: Any = self._manager.prepare_store(keys, context)
        if output is None:
            return None
        if len(output.keys_to_store) != len(keys):
            raise RuntimeError("a key of the host cache has a slot already; report this")
        self._manager.complete_store(keys, context)
        self._manager.get_stats()  # which forgets what it has counted
        evicted = [self._base.get_offload_block_hash(key) for key in output.evicted_keys]
        return Stored(output.store_spec.block_ids.tolist(), evicted)

    def pin(self, keys: Sequence[Any]) -> list[int]:
        """Return the slots of keys, which stay theirs until `unpin`."""
        spec: Any = self._manager.prepare_load(keys, self._base.ReqContext("host cache"))
        slots: list[int] = spec.block_ids.tolist()
        return slots

    def unpin(self, keys: Sequence[Any]) -> None:
        """Let the slots of keys be given to others again."""
        self._manager.complete_load(keys, self._context)

    def touch(self, keys: Sequence[Any]) -> None:
        """Make keys the last to go, the first of them last of all."""
        self._manager.touch(keys, self._context)

    def clear(self) -> None:
        """Forget all keys."""
        self._manager.reset_cache()


def copy_batch(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy between memories of a GPU and pinned ones of the host, on the current stream.

    One call of the driver, which hands them to the copy engines; they run in any order.

    Args:
        sources, targets: `[n]` int64 addresses, in host memory. sizes: `[n]` int64 bytes.
    """
    from vllm import _custom_ops

    _custom_ops.swap_blocks_batch(sources, targets, sizes)
