# SPDX-License-Identifier: Apache-2.0
"""Stores: where what requests have computed outlives them, and other requests find it.

    a request waits     lookup, blocks_needed      the first store that finds something serves it
    it begins           enter
    each step           publish, then mark_scheduled and take_message
    it evicts           released, when its head blocks are given back
    it ends             saves, prepare; leave, when its blocks are freed (also by a preemption)

`Stores` has them in the order in which they are asked, and knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm_pyramid.kv_cache.request_record import SchedulerRequest
    from vllm_pyramid.plan import RetentionPlan

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
