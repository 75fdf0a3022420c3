# SPDX-License-Identifier: Apache-2.0
"""A router: what it believes of a scheduler by its KV events, and what is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, maybe_convert_block_hash
from vllm.v1.request import Request

from tests.scheduler.checks import host_of
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator

HASH_BYTES = 32  # of SHA-256; what stands behind names KV of which no router is told


class Router:
    """Stands for the publisher of a scheduler, and replays what that publishes.

    Args:
        hash_size: tokens of one of a request's hashes.

    Attributes:
        blocks: names of the blocks that are there, by medium and KV cache group.
        seen: how often each kind of event came.
    """

    def __init__(self, hash_size: int) -> None:
        self.hash_size = hash_size
        self.blocks: dict[tuple[str, int], set[Any]] = {}
        self.seen: Counter[str] = Counter()
        self._replayed = 0  # of the pool's queue
        self._hashes: dict[Any, BlockHash] = {}  # of all blocks that were ever there, by name

    @classmethod
    def of(cls, scheduler: Any) -> Router:
        """Subscribe to a scheduler."""
        router = scheduler.kv_event_publisher = cls(scheduler.hash_block_size)
        return router

    def publish(self, batch: Any) -> None:
        """What the scheduler calls at the end of a step."""
        for event in batch.events[self._replayed :]:
            self.replay(event)
        self._replayed = 0

    def shutdown(self) -> None:
        """What the scheduler calls at its end."""

    def catch_up(self, scheduler: Any) -> None:
        """Replay what the scheduler publishes at the end of this step."""
        queue = scheduler.kv_cache_manager.block_pool.kv_event_queue
        for event in queue[self._replayed :]:
            self.replay(event)
        self._replayed = len(queue)

    def replay(self, event: Any) -> None:
        """Believe an event. No block is stored twice, and none is removed that is not there."""
        self.seen[type(event).__name__] += 1
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            return
        there = self.blocks.setdefault((event.medium, event.group_idx), set())
        hashes = set(event.block_hashes)
        assert len(hashes) == len(event.block_hashes) > 0
        if isinstance(event, BlockRemoved):
            assert hashes <= there, "removed and never stored"
            there -= hashes
            return
        assert isinstance(event, BlockStored)
        assert not hashes & there, "stored twice"
        there |= hashes
        self.check_contents(event)

    def check_contents(self, event: BlockStored) -> None:
        """The hashes are those of the tokens, behind those of the parent."""
        size, parent = event.block_size, None
        if event.parent_block_hash is not None:
            parent = self._hashes[event.parent_block_hash]
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None and len(event.extra_keys) == len(event.block_hashes)
        for index, found in enumerate(event.block_hashes):
            keys = event.extra_keys[index]
            tagged = None if keys is None else tuple(("cache_salt", key) for key in keys)
            for start in range(index * size, (index + 1) * size, self.hash_size):
                tokens = event.token_ids[start : start + self.hash_size]
                parent = hash_block_tokens(sha256, parent, tokens, tagged)
                tagged = None  # the first tokens of a prompt alone have it
            assert parent is not None and maybe_convert_block_hash(parent) == found
            self._hashes[found] = parent

    def check(self, coordinator: LockstepCoordinator, requests: dict[str, Request]) -> None:
        """What it believes of each request's prompt is what a lookup finds."""
        pool, prefixes = coordinator.block_pool, coordinator.prefixes
        group = coordinator.layout.groups[0]
        device = self.blocks.get((pool.medium, group), set())
        bare = [name for name in pool.bundles if len(name) == HASH_BYTES]
        for kind in prefixes.kinds[1:]:
            bare = [name for name in bare if kind.named([name])[0] in pool.bundles]
        assert device == _named(bare)
        for request in requests.values():
            hashes = prefixes.cache.hashes(request)
            names = map(maybe_convert_block_hash, hashes)
            believed = next((n for n, one in enumerate(names) if one not in device), len(hashes))
            found = [pool.longest_prefix(kind.named(hashes)) for kind in prefixes.kinds]
            assert believed == min(found), request.request_id
        for index, beside in enumerate(coordinator.stock_groups.groups):
            suffix = b"/" + str(index).encode()
            exact = [name[:HASH_BYTES] for name in pool.bundles if name[HASH_BYTES:] == suffix]
            assert self.blocks.get((pool.medium, beside.groups[0]), set()) == _named(exact)
        host = host_of(coordinator)
        if host is not None and host.files is None:
            entries = [name for name in host._entries if len(name) == HASH_BYTES]
            assert self.blocks.get(("CPU", group), set()) == _named(entries)


def _named(hashes: Iterable[bytes]) -> set[Any]:
    return {maybe_convert_block_hash(BlockHash(one)) for one in hashes}
