# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation go on with what the turn before has left, evicted as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache, copies_of
from vllm_pyramid.kv_cache.request_record import SchedulerRequest
from vllm_pyramid.kv_cache.session_cache import SessionCache, SessionSnapshot
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.plan import RetentionPlan


class SessionResume:
    """Resuming conversations, as a part of `LockstepCoordinator`.

    Attributes:
        origins: of requests that began with a state in the step that is being scheduled: the
            request that evicted, and the tokens computed there.
    """

    block_pool: BundlePool
    stock_groups: StockGroups
    block_copies: list[list[KVCacheBlockCopy]]
    held_blocks: npt.NDArray[np.int64]
    skipped_tokens: npt.NDArray[np.int64]
    origins: dict[str, tuple[str, int]]
    most_blocks: Callable[[str, int], npt.NDArray[np.int64]]
    remove_skipped_blocks: Callable[[str, int], None]
    _prefixes: PrefixCache
    _states: SessionCache
    _entries_per_row: int
    _requests: dict[str, SchedulerRequest]

    def turns(self, request_id: str) -> tuple[int, ...] | None:
        """Where the turns before this request ended; None if it belongs to no conversation."""
        conversation = self._requests[request_id].conversation
        return None if conversation is None else conversation.turns

    def resumed_tokens(self, request_id: str) -> int:
        """Tokens of the state with which a request began."""
        state = self._requests[request_id].resumed
        return 0 if state is None else state.tokens

    def resumable_tokens(self, request: Request, most: int, least: Callable[[int], int]) -> int:
        """Tokens of the state that a request without blocks could begin with; 0 if there is none.

        Its blocks are copied when the next allocation for the request succeeds.

        Args:
            most, least: see `SessionCache.find`.
        """
        known = self._requests[request.request_id]
        known.found = None
        if known.conversation is None or not known.conversation.keys:
            return 0
        assert known.plan is not None
        hashes = self._prefixes.hashes(request)
        state = self._states.find(
            hashes,
            known.plan,
            known.conversation.keys,
            most,
            least,
            lambda rows: self.stock_groups.covered(rows, known.suffix),
        )
        if state is None:
            return 0
        # What is copied must not be dissolved for the blocks that this request gets.
        needed = int(self.most_blocks(request.request_id, request.num_tokens).sum())
        copied = state.blocks
        if self.stock_groups:
            needed += self.stock_groups.missing_blocks(
                request.request_id, request.num_tokens, hit=state.tokens
            )
            copied += self.stock_groups.source_blocks(state.hashes, known.suffix)
        if needed > self.block_pool.get_num_free_blocks() - copied:
            return 0
        known.hit, known.found = [], state
        return state.tokens

    def _resume(self, request_id: str, request: SchedulerRequest, state: SessionSnapshot) -> None:
        """Begin a request without blocks with a state, as if it had evicted by itself."""
        plan = request.plan
        assert isinstance(plan, RetentionPlan) and not request.num_blocks
        if self.stock_groups:
            self._states.touch(state)  # it must not be dissolved for what they get
            copies = self.stock_groups.enter(request_id, state.hashes, request.suffix)
            self.block_copies[0] += copies  # there is one stage
        sources, own = self._states.adopt(request_id, state)
        self.block_copies[0] += copies_of(sources, own)
        self.origins[request_id] = state.origin, state.point
        self.held_blocks += np.array(list(map(len, own)), np.int64)
        self.skipped_tokens += state.skip
        request.num_blocks = len(state.hashes) * self._entries_per_row
        request.resolved = plan
        request.confirmed = request.released = plan.evictions_by(state.tokens)
        request.due = plan.next_eviction(state.tokens)
        request.found, request.resumed = None, state

    def take_origins(self) -> dict[str, tuple[str, int]]:
        """`origins` of the step that has just been scheduled."""
        origins, self.origins = self.origins, {}
        return origins

    def leave_state(self, request: Request) -> None:
        """When a request's blocks are freed next, let the next turn find what it holds.

        Only what has been processed: steps under way write behind that, unless they evict.
        """
        known = self._requests.get(request.request_id)
        if known is None or known.conversation is None or not known.num_blocks:
            return
        plan, computed = known.plan, request.num_computed_tokens
        processed = min(computed - request.num_in_flight_tokens, request.num_tokens)
        assert plan is not None
        self.remove_skipped_blocks(request.request_id, processed)
        by_then = plan.evictions_by(processed)
        number = max((one for one in known.conversation.keys if one <= by_then), default=0)
        if number and plan.evictions_by(computed) == by_then:
            known.leaves = request, number, processed
            self.stock_groups.show(request, processed, known.suffix)

    def _leave_state(self, request_id: str, known: SchedulerRequest) -> None:
        """Take what is left out of the tables."""
        if known.leaves is None:
            return
        request, number, tokens = known.leaves
        plan, conversation = known.plan, known.conversation
        assert plan is not None and conversation is not None
        origin = request_id
        if known.resumed is not None and known.resumed.number == number:
            origin = known.resumed.origin  # it has evicted nothing since
        self._states.keep(
            request_id,
            self._prefixes.hashes(request),
            plan.skip_after(number),
            plan.computed_at(number),
            conversation.keys[number],
            tokens,
            origin,
        )
