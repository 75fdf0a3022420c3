# SPDX-License-Identifier: Apache-2.0
"""The store of prefixes: what a request finds of its prompt in the cache, and publishes there.

Where KV heads have block tables of their own, some of them may never evict. Their blocks are then
bundles of their own, which a request keeps to its end; those of the others go back when it evicts:

    positions            0 ....... untouched ....... end of the prompt
    heads that evict     [ bundles          ][ own           ]     until the first eviction
    the others           [ bundles, to_end  ][ own           ]     until the request ends

A prefix is found as far as both kinds of bundles are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from vllm_pyramid.compat.side_channel import PREFIXES
from vllm_pyramid.kv_cache.block_copies import BlockCopies
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.cache_store import (
    CacheStore,
    Least,
    Numbers,
    RequestTerms,
    SchedulerRequest,
)
from vllm_pyramid.kv_cache.counters import CacheCounters
from vllm_pyramid.kv_cache.evicted_prefixes import EvictedPrefixes
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache, PrefixHit, SharedPrefix
from vllm_pyramid.kv_cache.request_plans import RequestPlans
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.plan import RetentionPlan

_NO_BOUND = np.array(np.iinfo(np.int64).max)


class PrefixStore(CacheStore[PrefixHit]):
    """Prefix caching: the part of a request's life in which its blocks may be others', too.

    Args:
        grow: gives a request tables for a number of tokens, and returns its new blocks,
            `[layers][blocks]`.

    Attributes:
        kinds: the prefixes in the pool and in the tables: one kind, or those of the heads that
            evict, and those of the others. cache: the first of them.
        bundle_blocks: `[stages]` blocks of all bundles at one range of positions.
    """

    name = PREFIXES

    def __init__(
        self,
        pool: BundlePool,
        kinds: Sequence[PrefixCache],
        stock_groups: StockGroups,
        layer_blocks: LayerBlocks,
        plans: RequestPlans,
        copies: BlockCopies,
        counters: CacheCounters,
        grow: Callable[[str, int], Sequence[Sequence[KVCacheBlock]]],
    ) -> None:
        self._pool, self.kinds, self._stock_groups = pool, kinds, stock_groups
        self.cache = cache = kinds[0]
        self.bundle_blocks: Numbers = np.sum([kind.bundle_blocks for kind in kinds], axis=0)
        self._layer_blocks, self._copies, self._counters = layer_blocks, copies, counters
        self._records, self._grow = plans.records, grow
        self._units_per_bundle = cache.tokens // layer_blocks.unit
        self._of_request: dict[str, SharedPrefix] = {}
        self._nothing = SharedPrefix.of(kinds)  # read only
        # For requests that published bundles in the step being scheduled: how many they had before.
        self._published_from: dict[str, int] = {}
        self.evicted = EvictedPrefixes(pool, cache, layer_blocks, plans.records)

    def of(self, request_id: str) -> SharedPrefix:
        """Return what others may have of a request's tables. Not to be written to."""
        return self._of_request.get(request_id, self._nothing)

    def _own(self, request_id: str) -> SharedPrefix:
        if (own := self._of_request.get(request_id)) is None:
            own = self._of_request[request_id] = SharedPrefix.of(self.kinds)
        return own

    def num_bundles(self, request_id: str) -> int:
        """Return the bundles of the first kind with which a request's tables begin."""
        return len(self.of(request_id).bundles[self.cache])

    # Looking up -------------------------------------------------------------------------------

    def lookup(
        self, request: Request, record: SchedulerRequest, most: int, least: Least
    ) -> PrefixHit | None:
        cache, terms = self.cache, record.terms
        plan = terms.plan
        assert plan is not None
        if plan.evicts:  # the queries that score a prompt are computed in any case
            most = min(most, plan.exact_tokens - least(plan.exact_tokens))
        if terms.reusable is not None:
            most = min(most, terms.reusable)
        most = max(most, 0)
        may_share = (
            most if terms.shareable is None else min(most, terms.shareable)
        ) // cache.tokens
        hit = cache.find(request, most, may_share)
        for kind in self.kinds[1:]:
            del hit[self._pool.longest_prefix(kind.named(hit)) :]
        without_copies = may_share
        if self._stock_groups:
            del hit[self._stock_groups.covered(hit, terms.suffix) :]
            without_copies = 0
        if len(hit) > without_copies and not self._fits(request, terms, hit, may_share):
            del hit[without_copies:]
        tier = self._pool.tier
        behind = cache.hashes(request)[len(hit) : most // cache.tokens]
        below = behind[: tier.longest_prefix(behind)]
        if behind:
            record.query = len(behind) * cache.tokens, len(below) * cache.tokens
        if not hit and not below:
            return None
        tokens = (len(hit) + len(below)) * cache.tokens
        return PrefixHit(hit, min(may_share, len(hit)), below, tokens)

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

    def idle_blocks(self, hit: Sequence[BlockHash]) -> npt.NDArray[np.int64]:
        """Return the blocks of the bundles of a hit that count as free, `[stages]`."""
        of_kinds = [
            kind.bundle_blocks * len(self._pool.idle_bundles(kind.named(hit)))
            for kind in self.kinds
        ]
        idle: Numbers = np.sum(of_kinds, axis=0)
        return idle

    def blocks_needed(
        self,
        request_id: str,
        record: SchedulerRequest,
        hit: PrefixHit,
        num_tokens: int,
        *,
        capped: bool,
    ) -> int:
        shared, pool, plan = hit.shared_names, self._pool, record.terms.plan
        have = hit.shared * self._units_per_bundle
        by_stage = self._layer_blocks.missing(have, -(-num_tokens // self._layer_blocks.unit))
        most = _NO_BOUND
        if capped and plan is not None:
            most = self._layer_blocks.most(plan, num_tokens)
        needed = np.minimum(by_stage, most)
        if pool.bottleneck(needed) <= pool.get_num_free_blocks():
            # Idle bundles that the request shares count as free, and will not any more; the most
            # blocks that it holds include what it shares.
            needed = np.minimum(by_stage + self.idle_blocks(shared), most)
        of_stock = 0
        if self._stock_groups:
            on_device = len(hit.names) * self.cache.tokens
            of_stock = self._stock_groups.missing_blocks(
                request_id, num_tokens, capped=capped, hit=on_device
            )
        return pool.bottleneck(needed) + of_stock

    def enter(self, request_id: str, record: SchedulerRequest, hit: PrefixHit) -> None:
        own = self._own(request_id)
        if record.num_blocks or own.bundles[self.cache]:
            raise RuntimeError(
                f"request {request_id}: it begins with a prefix and holds {record.num_blocks} "
                "blocks of each layer already; report this"
            )
        shared, copied = hit.shared_names, hit.names[hit.shared :]
        sources = self.cache.blocks_of(copied)
        if shared:
            to_end = self._to_end(record)
            for kind in self.kinds:
                own.bundles[kind], revived = kind.enter(request_id, kind.named(shared), to_end)
                self._counters.held_blocks += kind.blocks * revived
            record.num_blocks = len(shared) * self._units_per_bundle
        for block_hash in reversed(copied):
            self._pool.touch_bundle(block_hash)
        if self._stock_groups and hit.names:
            suffix = record.terms.suffix
            self._copies.add_stock(*self._stock_groups.enter(request_id, hit.names, suffix))
        if not copied and not hit.below:
            return
        tier = self._pool.tier
        tier.pin(hit.below)
        blocks = self._grow(request_id, hit.tokens)
        self._copies.add(
            sources, [one[: len(source)] for source, one in zip(sources, blocks, strict=False)]
        )
        if hit.below:
            own.from_below = len(hit.names) * self.cache.tokens, hit.tokens
        for index, name in enumerate(hit.below, len(copied)):
            tier.load(name, [one[index] for one in blocks])

    # Publishing -------------------------------------------------------------------------------

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let other requests find blocks whose KV this step computes at the latest.

        Requests of the same step may find them, too: attention reads what all requests of a step
        have written.
        """
        request_id = request.request_id
        record = self._records.get(request_id)
        if record is None:
            return
        if record.is_ordered:
            return
        if self._stock_groups:
            self._stock_groups.note(request, num_computed_tokens, record.terms.suffix)
        if record.released:
            return
        own = self.of(request_id)
        if record.query[0]:
            self._pool.tier.count_query(*record.query)
            record.query = 0, 0
        tokens, shareable = num_computed_tokens, record.terms.shareable
        if shareable is not None and shareable < tokens:
            tokens = shareable
        known = len(own.bundles[self.cache])
        if tokens // self.cache.tokens <= known:
            return  # nearly every request, every step
        own, to_end = self._own(request_id), self._to_end(record)
        for kind, bundles in own.bundles.items():
            bundles += kind.publish(request, known, tokens, to_end)
        if len(own.bundles[self.cache]) > known:
            self._published_from.setdefault(request_id, known)

    def mark_scheduled(self) -> None:
        for request_id, before in self._published_from.items():
            own = self._of_request[request_id]
            for bundles in own.bundles.values():
                for bundle in bundles[before:]:
                    bundle.scheduled = True
        self._published_from.clear()
        self._stock_groups.publish_noted()

    def take_message(self, evicting: Sequence[Request]) -> dict[str, list[int]] | None:
        """Return the blocks that take copies of what evictions overwrite, by request id."""
        if not evicting:
            return None
        with_own = [(request, self.num_bundles(request.request_id)) for request in evicting]
        return self.evicted.reserve(with_own) or None

    def enter_front(
        self, request_id: str, front: Sequence[BlockHash], shared: int, heads: Sequence[int]
    ) -> None:
        """Begin empty tables with heads, `[tables]`, and the bundles of what stays in place.

        `shared` of the bundles are there; the others come from the tier below, into blocks that
        others find from now on.
        """
        cache, own = self.cache, self._own(request_id)
        bundles, revived = cache.enter(request_id, front[:shared], shared, heads)
        if loaded := cache.load(request_id, front[shared:]):
            self._published_from[request_id] = shared
        own.bundles[cache] = bundles + loaded
        self._counters.held_blocks += cache.blocks * (revived + len(loaded))

    # Questions --------------------------------------------------------------------------------

    def findable_tokens(self, request_id: str) -> int:
        """Return the tokens of a request that others find, or will find when it has evicted."""
        pending = self.evicted.pending.get(request_id)
        copied = 0 if pending is None else len(pending.hashes)
        return (self.num_bundles(request_id) + copied) * self.cache.tokens

    def claim(self, request_id: str, first: int) -> None:
        """Make the bundles of a request from number `first` on its own, before it writes to them.

        No lookup finds them from now on, nor what the step being scheduled computes.
        """
        self._pool.has_gaps = True
        self._published_from.pop(request_id, None)
        self._stock_groups.forget_noted(request_id)
        for kind, bundles in self.of(request_id).bundles.items():
            kind.claim(request_id, bundles[first:])
            del bundles[first:]

    # Leaving --------------------------------------------------------------------------------------

    def released(
        self, request_id: str, record: SchedulerRequest, resolved: RetentionPlan
    ) -> tuple[Numbers, Numbers]:
        stay = min(self._to_end(record), self.num_bundles(request_id))
        shared = self.cache.blocks * (self.num_bundles(request_id) - stay)
        kept = self.evicted.keep(request_id, resolved)
        unused = kept
        for kind, bundles in self.of(request_id).bundles.items():
            if len(bundles) > stay and not kind.to_end:
                heads = (self.cache.blocks * stay).tolist() if stay else ()
                unused = unused + kind.blocks * kind.leave(request_id, bundles[stay:], heads)
                del bundles[stay:]
        return shared + kept, unused

    def leave(self, request_id: str, record: SchedulerRequest) -> Numbers | int:
        own = self._of_request.pop(request_id, self._nothing)
        self._withdraw_unscheduled(request_id, own)
        self.evicted.keep(request_id, record.resolved)
        others: Numbers | int = 0
        heads, plan = list[int](), record.resolved
        if record.released and plan is not None and plan.in_place:
            heads = (plan.skip_after(record.released) // self.cache.tokens).tolist()
        for kind, bundles in own.bundles.items():
            if bundles:
                unused = kind.leave(request_id, bundles, heads)
                others = others + kind.blocks * (len(bundles) - unused)
        return others

    def _to_end(self, record: SchedulerRequest) -> int:
        """Return how many bundles a request has to its end: those of what stays in place."""
        plan = record.resolved or record.plan
        return 0 if plan is None else plan.in_place // self.cache.tokens

    def _withdraw_unscheduled(self, request_id: str, own: SharedPrefix) -> None:
        """Take back what a request published in the step that preempts it: no other uses it yet."""
        before = self._published_from.pop(request_id, None)
        for kind, bundles in own.bundles.items() if before is not None else ():
            kind.withdraw(request_id, bundles[before:])
            del bundles[before:]
