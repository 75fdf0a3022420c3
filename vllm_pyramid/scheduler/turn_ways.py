# SPDX-License-Identifier: Apache-2.0
"""Choose how a later turn of a conversation continues: as it computes fewer tokens (`AUTO_MODE`).

    earlier turns   n_1   n_2   n_3 (exact)   n_4
    resume           x     x     x             x      evict where all of them ended
    restarted                    x             x      from the last turn on that was exact
    exact                                             evict at the prompt's own end alone

The three differ in the earlier turns that count, and in nothing else: an exact turn is the first
turn of a conversation, so it leaves a session snapshot with which the next turn restarts. The way
is chosen by what the stores have when the request starts, and stays when it is preempted.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.kv_cache.cache_store import RequestTerms, SchedulerRequest
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.plan import Plan
from vllm_pyramid.policy.request import ALLOCATOR_KEY, ServedRequest
from vllm_pyramid.policy.request_keys import EXACT, RESUME
from vllm_pyramid.scheduler.request_planner import RequestPlanner

# Exact turns that are remembered, 32 bytes and a dictionary's entry each.
MAX_STARTS = 1 << 14


class Resuming(NamedTuple):
    """What a turn would have done that was computed exactly, because that found more.

    Attributes:
        terms: with its earlier turns. tokens: that it would have begun with.
        from_session: how many of these a session snapshot has.
    """

    terms: RequestTerms
    tokens: int
    from_session: int


class TurnWays:
    """The ways of one scheduler's requests.

    `least_before` is the fewest tokens of a chunk that ends at a point of a request's plan.
    `resuming` has, of the requests that are computed exactly, what they would have done instead.
    """

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        planner: RequestPlanner,
        least_before: Callable[[Plan, int], int],
    ) -> None:
        self._coordinator, self._planner = coordinator, planner
        self._least_before = least_before
        self._ways: dict[str, list[RequestTerms]] = {}
        self._arrived: dict[str, RequestTerms] = {}  # with a choice, whose ways are not planned yet
        self.resuming: dict[str, Resuming] = {}
        # The ends of exact turns, by the tokens up to there, the latest last.
        self._starts: OrderedDict[bytes, None] = OrderedDict()

    def add(self, request: Request, terms: RequestTerms) -> None:
        """Note the ways of a request that has arrived, if there is a choice.

        There is none for a request with a ticket, which another engine has planned in the same way,
        and for one with a plan of a method's.
        """
        served, params = terms.served, request.sampling_params
        if served is None or not (served.auto and served.turns) or served.error is not None:
            return
        if not self._planner.shares_prefixes or request.kv_transfer_params:
            return
        if params is None or ALLOCATOR_KEY in (params.extra_args or ()):
            return
        self._arrived[request.request_id] = terms

    def _plan(self, request: Request) -> None:
        """Plan the ways of a request, once its first tokens are found: before, none finds more."""
        terms = self._arrived[request.request_id]
        cache, tier = self._coordinator.prefixes.cache, self._coordinator.block_pool.tier
        is_found = cache.find(request, cache.tokens, 1)
        first = cache.hashes(request)[:1]
        if not (self._starts or is_found or tier.longest_prefix(first)):
            return
        del self._arrived[request.request_id]
        served = terms.served
        assert served is not None and served.turns is not None
        start = self._last_start(request, served.turns)
        chains = dict.fromkeys((served.turns[start:], ())) if start else ((),)
        others = (self._planner.with_turns(request, served, turns) for turns in chains)
        ways = [terms, *(other for other in others if other is not None)]
        if len(ways) > 1:
            self._ways[request.request_id] = ways

    def find(self, request: Request, most: int, *, shared: bool) -> int:
        """Find what a request without blocks need not compute, and choose its way by it.

        The first way in the order above has precedence where two find equally much.
        """
        records, request_id = self._coordinator.plans.records, request.request_id
        if request_id in self._arrived:
            self._plan(request)
        ways = self._ways.get(request_id)
        if ways is None or request.status == RequestStatus.PREEMPTED:  # the workers have its plan
            return self._found(request, records[request_id], most, shared)
        best = records[request_id] = SchedulerRequest.at_start(ways[0])
        tokens = self._found(request, best, most, shared)
        resuming = Resuming(ways[0], tokens, self._from_session(best))
        for terms in ways[1:]:
            record = SchedulerRequest.at_start(terms)
            if (found := self._found(request, record, most, shared)) > tokens:
                best, tokens = record, found
                if _turns(terms):
                    resuming = Resuming(terms, found, self._from_session(record))
        records[request_id] = best
        self.resuming.pop(request_id, None)
        if not _turns(best.terms):
            self.resuming[request_id] = resuming
        self._tell_workers(request, _turns(best.terms))
        return tokens

    def _found(self, request: Request, record: SchedulerRequest, most: int, shared: bool) -> int:
        assert record.plan is not None
        least = partial(self._least_before, record.plan)
        return self._coordinator.stores.find(request, record, most, least, shared=shared)

    def _tell_workers(self, request: Request, turns: tuple[int, ...]) -> None:
        params = request.sampling_params
        assert params is not None and params.extra_args is not None, "it has turns"
        if tuple(params.extra_args["kv_turns"]) != turns:
            request.sampling_params = copy.copy(params)  # the object may be the client's
            request.sampling_params.extra_args = {**params.extra_args, "kv_turns": list(turns)}

    def mode(self, request_id: str, served: ServedRequest) -> str:
        """Return the mode of a turn, as its report says it."""
        return EXACT if served.exact or request_id in self.resuming else RESUME

    def ends(self, request: Request) -> None:
        """Let later turns restart behind an exact one that has ended."""
        if request.request_id in self.resuming:
            name = self._end(request, request.num_prompt_tokens, self._hashes(request))
            self._starts[name] = None
            self._starts.move_to_end(name)
            if len(self._starts) > MAX_STARTS:
                self._starts.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._ways.pop(request_id, None)
        self._arrived.pop(request_id, None)
        self.resuming.pop(request_id, None)

    def _last_start(self, request: Request, turns: Sequence[int]) -> int:
        """Return the index of the last of a request's turns that was exact; 0 if none was."""
        hashes = self._hashes(request) if self._starts else ()
        for index in range(len(turns) - 1, 0, -1) if self._starts else ():
            if self._end(request, turns[index], hashes) in self._starts:
                return index
        return 0

    def _hashes(self, request: Request) -> Sequence[BlockHash]:
        return self._coordinator.prefixes.cache.hashes(request)

    def _end(self, request: Request, end: int, hashes: Sequence[BlockHash]) -> bytes:
        """Return a name of the tokens up to a turn's end, given the hashes of whole bundles."""
        size = self._coordinator.prefixes.cache.tokens
        whole = end // size
        tail = np.array(request.all_token_ids[whole * size : end], np.int64)
        return sha256((hashes[whole - 1] if whole else b"") + tail.tobytes()).digest()

    def _from_session(self, record: SchedulerRequest) -> int:
        """Return the tokens that a session snapshot has of what was found."""
        found = record.found
        if found is None or found.store is not self._coordinator.sessions:
            return 0
        return found.hit.tokens


def _turns(terms: RequestTerms) -> tuple[int, ...]:
    assert terms.served is not None and terms.served.turns is not None
    return terms.served.turns
