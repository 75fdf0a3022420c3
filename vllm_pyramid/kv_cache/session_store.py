# SPDX-License-Identifier: Apache-2.0
"""The store of sessions: a turn continues with what the turn before has saved, evicted as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_pyramid.compat.side_channel import SESSIONS
from vllm_pyramid.kv_cache.block_copies import BlockCopies
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.cache_store import CacheStore, Least, Numbers, SchedulerRequest
from vllm_pyramid.kv_cache.counters import CacheCounters
from vllm_pyramid.kv_cache.evicted_names import turn_name
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.prefix_store import PrefixStore
from vllm_pyramid.kv_cache.session_cache import SessionCache, SessionSnapshot
from vllm_pyramid.kv_cache.stock_groups import StockGroups


class SessionToSave(NamedTuple):
    """A session of `tokens` computed tokens behind eviction `number`, saved when its blocks go."""

    request: Request
    number: int
    tokens: int


class SessionStore(CacheStore[SessionSnapshot]):
    """Sessions: how a request begins with one, and how it saves one for the next turn.

    There is one pipeline stage, and all blocks have the same number of tokens.
    """

    name = SESSIONS

    def __init__(
        self,
        pool: BundlePool,
        cache: SessionCache,
        prefixes: PrefixStore,
        stock_groups: StockGroups,
        layer_blocks: LayerBlocks,
        copies: BlockCopies,
        counters: CacheCounters,
    ) -> None:
        self._pool, self._cache, self._prefixes = pool, cache, prefixes
        self._prefix_cache = prefix_cache = prefixes.cache
        self._stock_groups, self._layer_blocks = stock_groups, layer_blocks
        self._copies, self._counters = copies, counters
        self._units_per_bundle = prefix_cache.tokens // layer_blocks.unit
        self._resumed: dict[str, SessionSnapshot] = {}
        self._to_save: dict[str, SessionToSave] = {}
        self._resumed_from: dict[str, tuple[str, int]] = {}

    def resumed_tokens(self, request_id: str) -> int:
        """Return the tokens of the session with which a request began."""
        session = self._resumed.get(request_id)
        return 0 if session is None else session.tokens

    # Looking up -------------------------------------------------------------------------------

    def lookup(
        self, request: Request, record: SchedulerRequest, most: int, least: Least
    ) -> SessionSnapshot | None:
        terms = record.terms
        if (names := terms.evicted) is None:
            return None
        session = self._cache.find(
            self._prefix_cache.hashes(request),
            names.plan,
            names.keys,
            most,
            least,
            lambda hashes: self._stock_groups.covered(hashes, terms.suffix),
            partial(self._turn_name, request),
        )
        if session is None:
            return None
        # The blocks that this request gets must not come from those that it copies.
        shared = session.shared_names
        needed = int(self._layer_blocks.most(names.plan, request.num_tokens).sum())
        needed -= len(shared) * self._layer_blocks.num_tables
        copied = session.num_blocks + int(self._prefixes.idle_blocks(shared).sum())
        if self._stock_groups:
            needed += self._stock_groups.missing_blocks(
                request.request_id, request.num_tokens, hit=session.tokens
            )
            copied += self._stock_groups.source_blocks(session.hashes, terms.suffix)
        if needed > self._pool.get_num_free_blocks() - copied:
            return None
        return session

    def blocks_needed(
        self,
        request_id: str,
        record: SchedulerRequest,
        hit: SessionSnapshot,
        num_tokens: int,
        *,
        capped: bool,
    ) -> int:
        starts = self._cache.heads(hit.skip) + hit.shared
        blocks = int((cdiv(num_tokens, self._prefix_cache.tokens) - starts).sum())
        # They count as free until then.
        blocks += int(self._prefixes.idle_blocks(hit.shared_names).sum())
        if capped:
            blocks = min(blocks, int(self._layer_blocks.most(hit.plan, num_tokens)[0]))
        return blocks + self._stock_groups.missing_blocks(
            request_id, num_tokens, capped=capped, hit=hit.tokens
        )

    def enter(self, request_id: str, record: SchedulerRequest, hit: SessionSnapshot) -> None:
        """Begin the tables of a request with its session, as if it had evicted."""
        if record.num_blocks:
            raise RuntimeError(
                f"request {request_id} has {record.num_blocks} blocks already, where its tables "
                "begin; report this"
            )
        if self._stock_groups or hit.front:
            self._cache.touch(hit)  # what is allocated for these must not come from the session
        if self._stock_groups:
            suffix = record.terms.suffix
            self._copies.add_stock(*self._stock_groups.enter(request_id, hit.hashes, suffix))
        if hit.front:
            self._pool.tier.pin(hit.in_host)
            heads = self._cache.heads(hit.skip).tolist()
            self._prefixes.enter_front(request_id, hit.front, hit.shared, heads)
        sources, own = self._cache.adopt(request_id, hit)
        self._copies.add(
            sources, [blocks[: len(source)] for source, blocks in zip(sources, own, strict=True)]
        )
        # The base is of all that was evicted, too.
        below = len(hit.in_host) * self._prefix_cache.tokens if hit.bundles else hit.tokens
        self._pool.tier.count_query(below, below)
        self._resumed_from[request_id] = hit.origin, hit.point
        self._counters.held_blocks += np.array(list(map(len, own)), np.int64)
        self._counters.skipped_tokens += hit.skip
        num_blocks = self._cache.num_rows(hit) * self._units_per_bundle
        record.begin_evicted(hit.plan, hit.tokens, num_blocks)
        self._resumed[request_id] = hit

    def take_message(self, evicting: Sequence[Request]) -> dict[str, tuple[str, int]] | None:
        """Return which sessions requests of the step just scheduled began with.

        By request, the request that evicted and the tokens that were computed when it did.
        """
        resumed_from, self._resumed_from = self._resumed_from, {}
        return resumed_from or None

    # Saving -----------------------------------------------------------------------------------

    def saves(self, record: SchedulerRequest) -> bool:
        return record.terms.evicted is not None

    def prepare(self, request: Request, record: SchedulerRequest, processed: int) -> None:
        """Note the session of a request that has ended.

        Only processed tokens belong to it. Steps under way write behind these, unless they evict.
        """
        names = record.terms.evicted
        assert names is not None, "it saves nothing"
        plan = names.plan
        by_now = plan.evictions_by(processed)
        number = max((number for number in names.keys if number <= by_now), default=0)
        if number and plan.evictions_by(request.num_computed_tokens) == by_now:
            self._to_save[request.request_id] = SessionToSave(request, number, processed)
            self._stock_groups.publish(request, processed, record.terms.suffix)

    def leave(self, request_id: str, record: SchedulerRequest) -> Numbers | int:
        """Move the blocks of a noted session out of the request's tables into the cache."""
        resumed = self._resumed.pop(request_id, None)
        if (saved := self._to_save.pop(request_id, None)) is None:
            return 0
        names, number = record.terms.evicted, saved.number
        assert names is not None, "it saves nothing"
        origin = request_id
        if resumed is not None and resumed.number == number:
            origin = resumed.origin  # it has evicted nothing since
        point, key = names.plan.computed_at(number), names.keys[number]
        hashes = self._prefix_cache.hashes(saved.request)
        self._cache.keep(
            request_id,
            hashes,
            names.plan.skip_after(number) + names.plan.in_place,
            point,
            key,
            saved.tokens,
            origin,
            self._turn_name(saved.request, point, key),
        )
        self._pool.touch_prefix(hashes[: names.plan.in_place // self._prefix_cache.tokens])
        return 0

    def _turn_name(self, request: Request, point: int, key: bytes) -> BlockHash | None:
        """Return `turn_name`; None beside stock groups, which continue at the edges of blocks."""
        if self._stock_groups:
            return None
        cache = self._prefix_cache
        return turn_name(request, cache.hashes(request), cache.tokens, point, key)
