# SPDX-License-Identifier: Apache-2.0
"""Layers that no policy evicts from: sliding windows, chunks, states, a draft model's layers.

Their blocks come from the pool of the layers that evict. vLLM puts each of them into a KV cache
group of its own, and its managers say what they hold. Layers of one spec make one `StockGroup`.

With prefix caching, computed blocks become bundles (`bundles.py`), one per group and range of
positions. A bundle belongs to its request as long as the request attends to it, and is idle from
then on. A prefix or a session (`session_cache.py`) is found as far as the cache has all that its
next token attends to. The request copies it into its own blocks: a window soon passes its blocks,
so sharing them would gain little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.stock_group import Computed, Numbers, StockGroup, Suffix


class StockGroups:
    """The layers of a model that keep what vLLM keeps, whatever the policy; one group per spec.

    `managers` are vLLM's of all such layers, with their places among all groups.
    """

    def __init__(
        self, managers: Sequence[tuple[int, SingleTypeKVCacheManager]], pool: BundlePool
    ) -> None:
        self._pool = pool
        by_spec: dict[KVCacheSpec, list[tuple[int, SingleTypeKVCacheManager]]] = defaultdict(list)
        for place, manager in managers:
            by_spec[manager.kv_cache_spec].append((place, manager))
        self.groups = [
            StockGroup(pool, index, spec, members)
            for index, (spec, members) in enumerate(by_spec.items())
        ]
        self._num_layers = len(managers)
        self._shares = False
        # Requests of the step being scheduled, and what it computes of them.
        self._noted: dict[str, Computed] = {}

    def __len__(self) -> int:
        return self._num_layers

    def share(self, bundle_tokens: int, hash_tokens: int) -> bool:
        """Let prefixes be found from now on; False if the layers have a state, or larger blocks.

        A bundle of the evicting layers has `bundle_tokens` tokens, a request's hash `hash_tokens`.
        """
        self._shares = all(group.may_share(bundle_tokens) for group in self.groups)
        if self._shares:
            for group in self.groups:
                group.share(bundle_tokens, hash_tokens)
        return self._shares

    @property
    def are_drafts(self) -> bool:
        """Return whether all of them are a draft model's; True also without any."""
        return all(group.keeps_all for group in self.groups)

    @property
    def held_blocks(self) -> int:
        """Return the blocks of the pool that all requests hold in these layers."""
        return sum(group.held_blocks for group in self.groups)

    def block_sizes(self, max_model_len: int) -> list[int]:
        """Return the tokens of a block per group, without groups whose blocks hold sequences."""
        return [group.block_size for group in self.groups if group.block_size < max_model_len]

    def blocks_of(self, tokens: Numbers | int, in_flight: Numbers | int) -> Numbers:
        """Return the most blocks that requests with `tokens` tokens hold, in any shape.

        `in_flight` tokens are scheduled, and their steps have not ended.
        """
        total = np.zeros(np.broadcast(tokens, in_flight).shape, np.int64)
        for group in self.groups:
            total += group.blocks_of(tokens, in_flight)
        return total

    # Blocks -----------------------------------------------------------------------------------

    def missing_blocks(
        self, request_id: str, num_tokens: int, *, capped: bool = False, hit: int = 0
    ) -> int:
        """Return the blocks that a request needs in all these layers for `num_tokens` tokens.

        Args:
            capped: count only what the request holds at any one time (vLLM's admission).
            hit: tokens that the request finds in the cache, if it has no blocks yet.
        """
        return sum(
            group.missing_blocks(request_id, num_tokens, capped, hit) for group in self.groups
        )

    def allocate(self, request_id: str, num_tokens: int) -> dict[int, list[KVCacheBlock]]:
        """Give a request its next blocks; returns them by KV cache group that gets some."""
        found: dict[int, list[KVCacheBlock]] = {}
        for group in self.groups:
            if new_blocks := group.allocate(request_id, num_tokens):
                found |= zip(group.groups, new_blocks, strict=True)
        return found

    def drop_unseen(self, request_id: str, processed: int) -> None:
        """Give back the blocks that no token behind the `processed` ones attends to."""
        for group in self.groups:
            group.drop_unseen(request_id, processed)

    def forget(self, request_id: str) -> None:
        """Drop a request's tables before the managers free its blocks; its bundles become idle."""
        self._noted.pop(request_id, None)
        for group in self.groups:
            group.forget(request_id)

    # Prefixes ---------------------------------------------------------------------------------

    def note(self, request: Request, tokens: int, suffix: Suffix) -> None:
        """Note that the step being scheduled computes a request up to `tokens` tokens."""
        request_id = request.request_id
        if self._shares and request_id in self.groups[0].tables:
            self._noted[request_id] = Computed(request.block_hashes, suffix, tokens)

    def forget_noted(self, request_id: str) -> None:
        """Publish nothing that the step being scheduled computes of a request."""
        self._noted.pop(request_id, None)

    @property
    def noted_requests(self) -> list[str]:
        """Return the requests of the step being scheduled."""
        return list(self._noted)

    def publish_noted(self) -> None:
        """Let later steps find what this step computes."""
        for request_id, computed in self._noted.items():
            for group in self.groups:
                group.publish(request_id, computed)
        self._noted.clear()

    def publish(self, request: Request, tokens: int, suffix: Suffix) -> None:
        """Let others find the first `tokens` tokens of a request, which are computed, at once."""
        request_id = request.request_id
        if self._shares and request_id in self.groups[0].tables:
            computed = Computed(request.block_hashes, suffix, tokens)
            for group in self.groups:
                group.publish(request_id, computed)

    def covered(self, hashes: Sequence[BlockHash], suffix: Suffix) -> int:
        """Return how many bundles a request can begin with: all that its next token sees is cached.

        `hashes` are of bundles of the evicting layers, from position 0 on.
        """
        count = len(hashes)
        windows = []
        for group in self.groups:
            if group.keeps_all:
                lacks = partial(group.lacks, hashes, suffix)
                count = bisect_left(range(count), True, key=lacks)
            else:
                windows.append(group)
        while count:
            lacking = [group.last_lacking(hashes, suffix, count) for group in windows]
            last = max((number for number in lacking if number is not None), default=None)
            if last is None:
                break
            count = last  # a request that begins right behind it would attend to it
        return count

    def sources(self, hashes: Sequence[BlockHash], suffix: Suffix) -> list[list[BlockHash]]:
        """Return, per group, the bundles that a request copies if it begins with `hashes`."""
        return [group.sources(hashes, suffix) for group in self.groups]

    def source_blocks(self, hashes: Sequence[BlockHash], suffix: Suffix) -> int:
        """Return how many blocks count as free and are copied by a request beginning here."""
        return sum(
            len(bundle.blocks)
            for names in self.sources(hashes, suffix)
            for bundle in self._pool.idle_bundles(names)
        )

    def enter(
        self, request_id: str, hashes: Sequence[BlockHash], suffix: Suffix
    ) -> tuple[list[list[KVCacheBlock]], list[list[KVCacheBlock]]]:
        """Begin a request's tables; return blocks to copy, and its own blocks that take them.

        The pool must have as many free blocks in addition to those that are copied.
        """
        sources = self.sources(hashes, suffix)
        blocks = [[self._pool.bundles[name].blocks for name in names] for names in sources]
        for names in sources:
            for name in reversed(names):
                self._pool.touch_bundle(name)
        copied: list[list[KVCacheBlock]] = []
        own: list[list[KVCacheBlock]] = []
        for group, of_group in zip(self.groups, blocks, strict=True):
            group_copied, group_own = group.enter(request_id, len(hashes), of_group)
            copied += group_copied
            own += group_own
        return copied, own
