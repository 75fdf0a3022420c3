# SPDX-License-Identifier: Apache-2.0
"""All stores of an engine, as one (`cache_store.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request

from vllm_pyramid.compat.side_channel import TIER
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.cache_store import CacheStore, Found, Least, Numbers, SchedulerRequest
from vllm_pyramid.plan import RetentionPlan


class Stores:
    """The stores in the order in which they are looked up, each called as `CacheStore` says."""

    def __init__(self, pool: BundlePool, stores: Sequence[CacheStore[Any]]) -> None:
        self._pool, self._stores = pool, list(stores)
        # Called for every request in every step, so those that do nothing are left out.
        self._publishing = [
            store for store in stores if type(store).publish is not CacheStore.publish
        ]

    def put_first(self, store: CacheStore[Any]) -> None:
        """Add a store that is looked up before all others."""
        self._stores.insert(0, store)

    def find(
        self,
        request: Request,
        record: SchedulerRequest,
        most: int,
        least: Least,
        *,
        shared: bool = True,
    ) -> int:
        """Look a request without blocks up; return the tokens that it need not compute.

        The first store that finds something, `most` tokens at most, serves it. Its blocks become
        the request's, or are copied, when its next allocation succeeds. `shared`: whether to look
        for what other requests have computed here.
        """
        record.found = None
        for store in self._stores:
            if not shared and store.shares:
                continue
            if (hit := store.lookup(request, record, most, least)) is not None:
                record.found = Found(store, hit)
                tokens: int = hit.tokens
                return tokens
        return 0

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find what this step computes of a request at the latest."""
        for store in self._publishing:
            store.publish(request, num_computed_tokens)

    def mark_scheduled(self) -> None:
        """Record that all that was published is computed, or will be in the scheduled step."""
        for store in self._stores:
            store.mark_scheduled()

    def take_messages(self, evicting: Sequence[Request]) -> dict[str, Any]:
        """Return what the workers must know of the step just scheduled, by the stores' names."""
        found = {store.name: store.take_message(evicting) for store in self._stores}
        # Last: to reserve blocks may dissolve bundles, which the tier stores.
        found[TIER] = self._pool.tier.take_message()
        return {name: message for name, message in found.items() if message is not None}

    def released(
        self, request_id: str, record: SchedulerRequest, resolved: RetentionPlan
    ) -> tuple[Numbers | int, Numbers | int]:
        """Take a request's shared blocks out of its tables; see `CacheStore.released`."""
        left: Numbers | int = 0
        unused: Numbers | int = 0
        for store in self._stores:
            of_store, of_nobody = store.released(request_id, record, resolved)
            left, unused = left + of_store, unused + of_nobody
        return left, unused

    def saves(self, record: SchedulerRequest) -> bool:
        """Return whether a store may save what a request holds when the request ends."""
        return any(store.saves(record) for store in self._stores)

    def prepare(self, request: Request, record: SchedulerRequest, processed: int) -> None:
        """Note what to save of a request which has ended, when its blocks are freed."""
        for store in self._stores:
            if store.saves(record):
                store.prepare(request, record, processed)

    def leave(self, request_id: str, record: SchedulerRequest) -> Numbers | int:
        """Take what is the stores' out of a request's tables; see `CacheStore.leave`."""
        others: Numbers | int = 0
        for store in reversed(self._stores):  # sessions take what prefixes leave
            others = others + store.leave(request_id, record)
        return others
