# SPDX-License-Identifier: Apache-2.0
"""What a request finds of its prompt in the cache, and what it publishes there.

Where KV heads have block tables of their own, some of them may never evict. Their blocks are then
bundles of their own, which a request keeps to its end; those of the others go back when it evicts:

    positions            0 ....... untouched ....... end of the prompt
    heads that evict     [ bundles          ][ own           ]     until the first eviction
    the others           [ lasting bundles  ][ own           ]     until the request ends

A prefix is found as far as both are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.block_copies import BlockCopies
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.counters import CacheCounters
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.request_plans import RequestPlans
from vllm_pyramid.kv_cache.request_record import RequestTerms, SchedulerRequest
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.plan.tiles import TILE


class PrefixSharing:
    """Prefix caching: the part of a request's life in which its blocks may be others', too.

    Args:
        lasting: see the attribute.

    Attributes:
        cache: the prefixes in the pool and in the tables.
        lasting: those of the heads that never evict, where others do; None: `cache` has all.
        bundle_blocks: `[stages]` blocks of all bundles at one range of positions.
        host: the host cache; None without one.
    """

    host: HostCache | None = None

    def __init__(
        self,
        pool: BundlePool,
        cache: PrefixCache,
        stock_groups: StockGroups,
        layer_blocks: LayerBlocks,
        plans: RequestPlans,
        copies: BlockCopies,
        counters: CacheCounters,
        lasting: PrefixCache | None = None,
    ) -> None:
        self._pool, self.cache, self._stock_groups = pool, cache, stock_groups
        self.lasting, self.bundle_blocks = lasting, cache.bundle_blocks
        if lasting is not None:
            self.bundle_blocks = cache.bundle_blocks + lasting.bundle_blocks
        self._layer_blocks, self._copies, self._counters = layer_blocks, copies, counters
        self._records = plans.records
        self._units_per_bundle = cache.tokens // layer_blocks.unit
        # For requests that published bundles in the step being scheduled: how many they had before.
        self._published_from: dict[str, int] = {}

    # Looking up -------------------------------------------------------------------------------

    def cached_tokens(self, request: Request, most: int) -> int:
        """Return how many tokens of a request without blocks are cached, at most `most`.

        Their blocks become the request's when its next allocation succeeds.
        """
        record, cache = self._records[request.request_id], self.cache
        terms = record.terms
        if terms.reusable is not None:
            most = min(most, terms.reusable)
        shared = most if terms.shareable is None else min(most, terms.shareable)
        may_share = shared // cache.tokens
        record.prefix_hit = hit = cache.find(request, most, may_share, terms.cache_key)
        if self.lasting is not None:
            del hit[self._pool.longest_prefix(self.lasting.named(hit)) :]
        without_copies = may_share
        if self._stock_groups:
            del hit[self._stock_groups.covered(hit, terms.suffix) :]
            without_copies = 0
        if len(hit) > without_copies and not self._fits(request, terms, hit, may_share):
            del hit[without_copies:]
        if self.host is None:
            self._cut_to_tiles(record)
            return len(hit) * cache.tokens
        behind = cache.hashes(request, terms.cache_key)[len(hit) : most // cache.tokens]
        record.host_hit = behind[: self.host.longest_prefix(behind)]
        record.host_query = len(behind) * cache.tokens
        self._cut_to_tiles(record)
        return (len(hit) + len(record.host_hit)) * cache.tokens

    def _cut_to_tiles(self, record: SchedulerRequest) -> None:
        """Leave out of a hit what would let a prompt that is computed in tiles begin inside one."""
        if not record.terms.sparse_tokens:
            return
        found = len(record.prefix_hit) + len(record.host_hit)
        whole = found * self.cache.tokens // TILE * TILE // self.cache.tokens
        del record.host_hit[max(whole - len(record.prefix_hit), 0) :]
        del record.prefix_hit[whole:]

    def _fits(
        self, request: Request, terms: RequestTerms, hit: list[BlockHash], may_share: int
    ) -> bool:
        """Return whether the request gets its blocks without dissolving those it copies."""
        plan = terms.plan
        assert plan is not None
        cache, bundle_blocks = self.cache, self.bundle_blocks
        needed = bundle_blocks * (-(-request.num_tokens // cache.tokens))
        needed = np.minimum(needed, self._layer_blocks.most(plan, request.num_tokens))
        needed -= bundle_blocks * min(may_share, len(hit))
        free = self._pool.free_by_stage()
        free -= self.idle_blocks(hit)
        if self._stock_groups:
            needed += self._stock_groups.missing_blocks(
                request.request_id, request.num_tokens, hit=len(hit) * cache.tokens
            )
            free -= self._stock_groups.source_blocks(hit, terms.suffix)
        return not (needed > free).any()

    def shared_hit(self, record: SchedulerRequest) -> list[BlockHash]:
        """Return the bundles of a request's hit that it would share, not copy."""
        shareable = record.terms.shareable
        if shareable is None:
            return record.prefix_hit
        return record.prefix_hit[: shareable // self.cache.tokens]

    def idle_blocks(self, hit: Sequence[BlockHash]) -> npt.NDArray[np.int64]:
        """Return the blocks of the bundles of a hit that count as free, `[stages]`."""
        idle = self.cache.bundle_blocks * len(self._pool.idle_bundles(hit))
        if self.lasting is not None:
            names = self.lasting.named(hit)
            idle = idle + self.lasting.bundle_blocks * len(self._pool.idle_bundles(names))
        return idle

    def enter(
        self, request_id: str, record: SchedulerRequest, tokens: int
    ) -> Sequence[Sequence[KVCacheBlock]]:
        """Begin the tables of a request without blocks with the bundles that it shares.

        Args:
            tokens: with which vLLM begins.

        Returns:
            `[layers][bundles]` blocks behind them, to be copied into blocks of its own.

        Raises:
            RuntimeError: the prefix has another number of tokens, or the request has blocks.
        """
        found = (len(record.prefix_hit) + len(record.host_hit)) * self.cache.tokens
        if found != tokens:
            raise RuntimeError(
                f"request {request_id}: a prefix of {found} tokens was found, and vLLM begins "
                f"with {tokens}; report this"
            )
        if record.num_blocks or record.bundles:
            raise RuntimeError(
                f"request {request_id}: it begins with a prefix and holds {record.num_blocks} "
                "blocks of each layer already; report this"
            )
        hit, shared = record.prefix_hit, self.shared_hit(record)
        copied = hit[len(shared) :]
        sources = self.cache.blocks_of(copied)
        if shared:
            record.bundles, revived = self.cache.enter(request_id, shared)
            record.num_blocks = len(shared) * self._units_per_bundle
            self._counters.held_blocks += self.cache.blocks * revived
            if self.lasting is not None:
                names = self.lasting.named(shared)
                record.lasting, revived = self.lasting.enter(request_id, names)
                self._counters.held_blocks += self.lasting.blocks * revived
        for block_hash in reversed(copied):
            self._pool.touch_bundle(block_hash)
        if self._stock_groups and hit:
            self._copies.add_stock(*self._stock_groups.enter(request_id, hit, record.terms.suffix))
        if self.host is not None:
            self.host.pin(record.host_hit)
        return sources

    def fill(
        self,
        record: SchedulerRequest,
        sources: Sequence[Sequence[KVCacheBlock]],
        own: Sequence[Sequence[KVCacheBlock]],
    ) -> None:
        """Order the copies into a request's first own blocks, `[layers][blocks]`.

        Args:
            sources: as of `enter`. own: blocks for these, and for what the host cache has.
        """
        copied = len(sources[0]) if sources else 0
        self._copies.add(
            sources, [blocks[: len(source)] for source, blocks in zip(sources, own, strict=False)]
        )
        if record.host_hit:
            first, tokens = len(record.prefix_hit), self.cache.tokens
            record.from_host = (first * tokens, (first + len(record.host_hit)) * tokens)
        for index, name in enumerate(record.host_hit, copied):
            assert self.host is not None
            self.host.load(name, [blocks[index] for blocks in own])

    # Publishing -------------------------------------------------------------------------------

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let other requests find blocks whose KV this step computes at the latest.

        Requests of the same step may find them, too: attention reads what all requests of a step
        have written.
        """
        record = self._records.get(request.request_id)
        if record is None:
            return
        if record.host_query:
            self._count_query(record)
        if self._stock_groups:
            self._stock_groups.note(request, num_computed_tokens, record.terms.suffix)
        if record.released:
            return
        tokens, shareable = num_computed_tokens, record.terms.shareable
        if shareable is not None and shareable < tokens:
            tokens = shareable
        if tokens // self.cache.tokens <= len(record.bundles):
            return  # nearly every request, every step
        key = record.terms.cache_key
        if bundles := self.cache.publish(request, len(record.bundles), tokens, key):
            self._published_from.setdefault(request.request_id, len(record.bundles))
            if self.lasting is not None:
                record.lasting += self.lasting.publish(request, len(record.bundles), tokens)
            record.bundles.extend(bundles)

    def _count_query(self, record: SchedulerRequest) -> None:
        """Count what a request that begins has looked for in the host cache, and found."""
        assert self.host is not None
        self.host.counters.queries += record.host_query
        self.host.counters.hits += len(record.host_hit) * self.cache.tokens
        record.host_hit, record.host_query = [], 0

    def mark_scheduled(self) -> None:
        """Record that all published blocks are computed, or will be in the scheduled step."""
        for request_id, before in self._published_from.items():
            record = self._records[request_id]
            for bundle in chain(record.bundles[before:], record.lasting[before:]):
                bundle.scheduled = True
        self._published_from.clear()
        self._stock_groups.publish_noted()

    def withdraw_unscheduled(self, request_id: str, record: SchedulerRequest) -> None:
        """Take back the bundles that a request published in the step that preempts it.

        No request has been admitted since, so no other request uses them.
        """
        before = self._published_from.pop(request_id, None)
        if before is None:
            return
        self.cache.withdraw(request_id, record.bundles[before:])
        del record.bundles[before:]
        if self.lasting is not None:
            self.lasting.withdraw(request_id, record.lasting[before:])
            del record.lasting[before:]

    def shared_bundles(self, request_id: str) -> dict[frozenset[str], int]:
        """Count bundles that several requests have, if this request began with its hit.

        Returns:
            The number of bundles by the set of requests that have them until they evict.
        """
        return self._shared(request_id, self.cache)

    def shared_lasting(self, request_id: str) -> dict[frozenset[str], int]:
        """Count, as `shared_bundles` does, bundles that requests have to their ends."""
        return {} if self.lasting is None else self._shared(request_id, self.lasting)

    def _shared(self, request_id: str, cache: PrefixCache) -> dict[frozenset[str], int]:
        hit = cache.named(self.shared_hit(self._records[request_id]))
        bundles = (self._pool.bundles[block_hash] for block_hash in hit)
        return cache.holders.shared(request_id, bundles)

    def findable_tokens(self, request_id: str) -> int:
        """Return the tokens of a request that others find, or will find when it has evicted."""
        record = self._records.get(request_id)
        if record is None:
            return 0
        pending = 0 if record.pending_copy is None else len(record.pending_copy.hashes)
        return (len(record.bundles) + pending) * self.cache.tokens

    # Leaving --------------------------------------------------------------------------------------

    def leave(self, request_id: str, record: SchedulerRequest) -> npt.NDArray[np.int64]:
        """Take the bundles of the layers that evict out of a request's tables.

        Returns:
            `[layers]` blocks that no request uses any more.
        """
        ended = self.cache.leave(request_id, record.bundles) if record.bundles else 0
        record.bundles = []
        unused: npt.NDArray[np.int64] = self.cache.blocks * ended
        return unused

    def leave_all(
        self, request_id: str, record: SchedulerRequest
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Take all bundles out of a request's tables.

        Returns:
            `[layers]` blocks of its bundles, and those of them that no request uses any more.
        """
        had = self.cache.blocks * len(record.bundles)
        unused = self.leave(request_id, record)
        if self.lasting is not None and record.lasting:
            had = had + self.lasting.blocks * len(record.lasting)
            unused += self.lasting.blocks * self.lasting.leave(request_id, record.lasting)
            record.lasting = []
        return had, unused
