# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation continue with what the turn before has saved, evicted as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.block_copies import BlockCopies
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.counters import CacheCounters
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.request_plans import RequestPlans
from vllm_pyramid.kv_cache.request_record import SchedulerRequest, SessionToSave
from vllm_pyramid.kv_cache.session_cache import Conversation, SessionCache, SessionSnapshot
from vllm_pyramid.kv_cache.stock_groups import StockGroups


class SessionResume:
    """Sessions: how a request begins with one, and how it saves one for the next turn."""

    def __init__(
        self,
        pool: BundlePool,
        cache: SessionCache,
        prefix_cache: PrefixCache,
        stock_groups: StockGroups,
        layer_blocks: LayerBlocks,
        plans: RequestPlans,
        copies: BlockCopies,
        counters: CacheCounters,
    ) -> None:
        self._pool, self._cache, self._prefix_cache = pool, cache, prefix_cache
        self._stock_groups, self._layer_blocks = stock_groups, layer_blocks
        self._copies, self._counters = copies, counters
        self._records = plans.records
        self._units_per_bundle = prefix_cache.tokens // layer_blocks.unit
        self._resumed_from: dict[str, tuple[str, int]] = {}

    def conversation(self, request_id: str) -> Conversation | None:
        """Return the conversation that a request belongs to; None without one."""
        return self._records[request_id].terms.conversation

    def resumed_tokens(self, request_id: str) -> int:
        """Return the tokens of the session with which a request began."""
        session = self._records[request_id].resumed
        return 0 if session is None else session.tokens

    # Looking up -------------------------------------------------------------------------------

    def resumable_tokens(self, request: Request, most: int, least: Callable[[int], int]) -> int:
        """Return the tokens of the session that a request without blocks could begin with, or 0.

        Its blocks are copied when the next allocation for the request succeeds.

        Args:
            most, least: see `SessionCache.find`.
        """
        record = self._records[request.request_id]
        terms, record.session_hit = record.terms, None
        conversation = terms.conversation
        if conversation is None or conversation.plan is None or not conversation.keys:
            return 0
        session = self._cache.find(
            self._prefix_cache.hashes(request),
            conversation.plan,
            conversation.keys,
            most,
            least,
            lambda hashes: self._stock_groups.covered(hashes, terms.suffix),
        )
        if session is None:
            return 0
        # The blocks that this request gets must not come from those that it copies.
        needed = int(self._layer_blocks.most(conversation.plan, request.num_tokens).sum())
        copied = session.num_blocks
        if self._stock_groups:
            needed += self._stock_groups.missing_blocks(
                request.request_id, request.num_tokens, hit=session.tokens
            )
            copied += self._stock_groups.source_blocks(session.hashes, terms.suffix)
        if needed > self._pool.get_num_free_blocks() - copied:
            return 0
        record.prefix_hit, record.session_hit = [], session
        record.host_hit, record.host_query = [], 0
        return session.tokens

    def blocks_to_allocate(
        self,
        request_id: str,
        session: SessionSnapshot,
        num_tokens: int,
        *,
        capped: bool,
    ) -> int:
        """Return the blocks that a request needs which begins with a session.

        There is one pipeline stage, and all blocks have the same number of tokens.

        Args:
            capped: count only what the request holds at any one time.
        """
        heads = self._cache.heads(session.skip)
        blocks = int((cdiv(num_tokens, self._prefix_cache.tokens) - heads).sum())
        if capped:
            blocks = min(blocks, int(self._layer_blocks.most(session.plan, num_tokens)[0]))
        return blocks + self._stock_groups.missing_blocks(
            request_id, num_tokens, capped=capped, hit=session.tokens
        )

    def enter(self, request_id: str, record: SchedulerRequest, tokens: int) -> None:
        """Begin the tables of a request without blocks with its session, as if it had evicted.

        Args:
            tokens: with which vLLM begins.

        Raises:
            RuntimeError: the session has another number of tokens, or the request has blocks.
        """
        session = record.session_hit
        assert session is not None
        if tokens != session.tokens:
            raise RuntimeError(
                f"request {request_id}: a session of {session.tokens} tokens was found, and vLLM "
                f"begins with {tokens}; report this"
            )
        if record.num_blocks:
            raise RuntimeError(
                f"request {request_id} has {record.num_blocks} blocks already, where its tables "
                "begin; report this"
            )
        if self._stock_groups:
            # What the stock groups allocate must not come from the session.
            self._cache.touch(session)
            suffix = record.terms.suffix
            self._copies.add_stock(*self._stock_groups.enter(request_id, session.hashes, suffix))
        sources, own = self._cache.adopt(request_id, session)
        self._copies.add(
            sources, [blocks[: len(source)] for source, blocks in zip(sources, own, strict=True)]
        )
        if self._cache.host is not None:
            # The base is of all that was evicted, too.
            if session.bundles:
                tokens = len(session.in_host) * self._prefix_cache.tokens
            self._cache.host.counters.queries += tokens
            self._cache.host.counters.hits += tokens
        self._resumed_from[request_id] = session.origin, session.point
        self._counters.held_blocks += np.array(list(map(len, own)), np.int64)
        self._counters.skipped_tokens += session.skip
        plan = session.plan
        record.num_blocks = len(session.hashes) * self._units_per_bundle
        record.resolved = plan
        record.confirmed = record.released = plan.evictions_by(session.tokens)
        record.due = plan.next_eviction(session.tokens)
        record.session_hit, record.resumed = None, session

    def take_resumed_from(self) -> dict[str, tuple[str, int]]:
        """Return which sessions requests began with in the step that has just been scheduled.

        Returns:
            By request, the request that evicted and the tokens that were computed when it did.
        """
        resumed_from, self._resumed_from = self._resumed_from, {}
        return resumed_from

    # Saving -----------------------------------------------------------------------------------

    def prepare(self, request: Request, record: SchedulerRequest, processed: int) -> None:
        """Note that the request's session is saved when its blocks are freed next.

        Only processed tokens belong to it. Steps under way write behind these, unless they evict.
        """
        conversation = record.terms.conversation
        if conversation is None or conversation.plan is None:
            return
        plan = conversation.plan
        by_now = plan.evictions_by(processed)
        number = max((number for number in conversation.keys if number <= by_now), default=0)
        if number and plan.evictions_by(request.num_computed_tokens) == by_now:
            record.session_to_save = SessionToSave(request, conversation, plan, number, processed)
            self._stock_groups.publish(request, processed, record.terms.suffix)

    def save(self, request_id: str, record: SchedulerRequest) -> None:
        """Move the blocks of a noted session out of the request's tables into the cache."""
        if record.session_to_save is None:
            return
        request, conversation, plan, number, tokens = record.session_to_save
        origin = request_id
        if record.resumed is not None and record.resumed.number == number:
            origin = record.resumed.origin  # it has evicted nothing since
        self._cache.keep(
            request_id,
            self._prefix_cache.hashes(request),
            plan.skip_after(number),
            plan.computed_at(number),
            conversation.keys[number],
            tokens,
            origin,
        )
