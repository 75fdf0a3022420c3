# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of a request, and the stores in which what it has computed outlives it.

    a request waits     lookup, blocks_needed      the first store that finds something serves it
    it begins           enter
    each step           publish, then mark_scheduled and take_message
    it evicts           released, when its head blocks are given back
    it ends             saves, prepare; leave, when its blocks are freed (also by a preemption)

`Stores` has them in the order in which they are asked, and knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.evicted_names import EvictedNames
from vllm_pyramid.plan import Plan, RetentionPlan
from vllm_pyramid.policy.request import ServedRequest

Numbers = npt.NDArray[np.int64]
# Fewest tokens that must remain to be computed before an eviction at a given point of the prompt.
Least = Callable[[int], int]


class Hit(Protocol):
    """What a store has found for a request.

    Attributes:
        tokens: leading tokens that the request need not compute.
        shared_names: of the bundles of a prefix that it would have with others.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def shared_names(self) -> Sequence[BlockHash]: ...


H = TypeVar("H", bound=Hit)


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What a request came with. A preemption does not change it.

    Attributes:
        plan: what every layer keeps; None for a request that keeps everything.
        shareable: leading tokens whose blocks the request may share; None: all.
        reusable: leading tokens that other requests may have computed; None: all.
        evicted: what names its KV behind its evictions; None: no other request finds that.
    """

    plan: Plan | None = None
    served: ServedRequest | None = None
    shareable: int | None = 0
    reusable: int | None = 0
    evicted: EvictedNames | None = None

    def suffix(self, end: int) -> bytes | None:
        """Return what a block's name has behind the hash of its tokens, for the first `end` tokens.

        It is empty for KV of the full cache; None if no other request may find it.
        """
        if self.reusable is None or end <= self.reusable:
            return b""
        return None if self.evicted is None else self.evicted.suffix(end)


@dataclass(slots=True)
class SchedulerRequest:
    """The record of a request: its terms, and its progress since it started or was preempted.

    Attributes:
        terms: what the request came with.
        plan: its plan now: that of `terms`, or what it has been ordered to keep since it started.
        found: what it could begin with, as last looked up, until it begins.
        query: tokens that it looked for in the tier below the pool, and found, until it begins.
        began: tokens that it began with, which were not computed.
        num_blocks: entries of its longest tables, null blocks included.
        tables: `[layers]` its tables in the layers' managers, once they have grown: looking all of
            them up again would cost more than a block for each.
        resolved: the plan by which the worker moved its survivors, once the worker has reported.
        confirmed: number of the latest eviction that the worker has reported.
        released: number of the latest eviction whose head has been given back.
        next_release_at: processed tokens at which its next head may go; None if none will.
    """

    terms: RequestTerms = RequestTerms()
    plan: Plan | None = None
    found: Found | None = None
    query: tuple[int, int] = (0, 0)
    began: int = 0
    num_blocks: int = 0
    tables: list[list[KVCacheBlock]] = field(default_factory=list)
    resolved: RetentionPlan | None = None
    confirmed: int = 0
    released: int = 0
    next_release_at: int | None = None

    @classmethod
    def at_start(cls, terms: RequestTerms) -> SchedulerRequest:
        """Make the record of a request that holds nothing: a new or a preempted one."""
        plan = terms.plan
        evicts = plan is not None and plan.evicts and not plan.waits_for_orders
        return cls(
            terms, plan, next_release_at=plan.exact_tokens if plan is not None and evicts else None
        )

    def begin_evicted(self, plan: RetentionPlan, tokens: int, num_blocks: int) -> None:
        """Begin as if the request had computed `tokens` tokens, and had evicted by then."""
        self.num_blocks, self.resolved = num_blocks, plan
        self.confirmed = self.released = plan.evictions_by(tokens)
        self.next_release_at = plan.next_eviction(tokens)

    @property
    def is_ordered(self) -> bool:
        """Whether it has been ordered to evict: what it computes since is not the full cache's."""
        return self.plan is not self.terms.plan


class CacheStore(Generic[H]):
    """One store. What a function of this class does is right for a store that needs no such call.

    Attributes:
        name: of its messages to the workers.
        shares: whether it finds what other requests have computed here, which a request may refuse
            and prefix caching may switch off.
        loads_later: whether vLLM's KV connector loads what it has found, once the request has
            entered: vLLM then counts a hit's tokens as external, and the request waits.
    """

    name = ""
    shares = True
    loads_later = False

    def lookup(
        self, request: Request, record: SchedulerRequest, most: int, least: Least
    ) -> H | None:
        """Return what a request without blocks could begin with, `most` tokens at most, or None."""
        return None

    def answer(self, hit: H) -> Sequence[int]:
        """Return the first tokens of the answer, where a hit has them; no step computes these."""
        return ()

    def blocks_needed(
        self, request_id: str, record: SchedulerRequest, hit: H, num_tokens: int, *, capped: bool
    ) -> int:
        """Return the blocks that a request needs for `num_tokens` tokens, if it begins with a hit.

        If `capped`, count only the most that it holds at any one time.
        """
        raise NotImplementedError

    def enter(self, request_id: str, record: SchedulerRequest, hit: H) -> None:
        """Begin the tables of a request with a hit. It has as many blocks as it was said to need.

        RuntimeError: the request has blocks already.
        """
        raise NotImplementedError

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find what this step computes of a request at the latest."""

    def mark_scheduled(self) -> None:
        """Record that all that was published is computed, or will be in the scheduled step."""

    def take_message(self, evicting: Sequence[Request]) -> Any:
        """Return what the workers must know of the step just scheduled; None for nothing.

        `evicting` are the requests that come to their first eviction in this step.
        """
        return None

    def released(
        self, request_id: str, record: SchedulerRequest, resolved: RetentionPlan
    ) -> tuple[Numbers | int, Numbers | int]:
        """Take a request's shared blocks out of its tables: it has evicted.

        Returns `[layers]` blocks that leave its tables, and those of them that no request has any
        more.
        """
        return 0, 0

    def saves(self, record: SchedulerRequest) -> bool:
        """Return whether it may save what a request holds when the request ends."""
        return False

    def prepare(self, request: Request, record: SchedulerRequest, processed: int) -> None:
        """Note what to save of a request which has ended, when its blocks are freed.

        `processed` counts the tokens whose steps have ended.
        """

    def leave(self, request_id: str, record: SchedulerRequest) -> Numbers | int:
        """Take what is the store's out of a request's tables, whose blocks are freed next.

        Returns `[layers]` blocks of its tables that other requests still have.
        """
        return 0


class Found(NamedTuple):
    """What was found for a request until it begins: the store, and its hit."""

    store: CacheStore[Any]
    hit: Hit
