# SPDX-License-Identifier: Apache-2.0
"""KV events: stores that tell routers which prefixes of prompts other requests find here.

    a bundle of a prompt is published             BlockStored
    no bundle of its hash is left in the pool     BlockRemoved
    the prefix cache is reset                     AllBlocksCleared, by vLLM's pool

Events name prompts as vLLM's own do, by the same hashes: a router cannot tell which engine has a
policy. So they speak of what every request finds that begins with these tokens: KV of the whole
cache. What is found only by requests with the same policy, budget or conversation is not announced:
sessions, and prompts whose KV a policy has changed. Each block is announced once until it is
removed, however many bundles have its hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.announced_block import AnnouncedBlock
from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.cache_store import CacheStore, Numbers, SchedulerRequest
from vllm_pyramid.kv_cache.prefix_store import PrefixStore
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.kv_cache.stores import Stores
from vllm_pyramid.plan import RetentionPlan


@dataclass(slots=True)
class _Seen:
    """A request with blocks, and how many bundles of its prefix and stock groups were looked at."""

    request: Request
    prefix: int
    beside: list[int]


class AnnouncingStores(Stores):
    """The stores of an engine that publishes KV events (`--kv-events-config`).

    `group` is the KV cache group that stands in events for all layers that evict.
    """

    def __init__(
        self,
        pool: BundlePool,
        stores: Sequence[CacheStore[Any]],
        prefixes: PrefixStore,
        stock_groups: StockGroups,
        group: int,
    ) -> None:
        super().__init__(pool, stores)
        self._prefixes, self._stock_groups, self._group = prefixes, stock_groups, group
        self._tokens = prefixes.cache.tokens
        self._seen: dict[str, _Seen] = {}

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        super().publish(request, num_computed_tokens)
        request_id = request.request_id
        if (seen := self._seen.get(request_id)) is None:
            seen = _Seen(request, 0, [0] * len(self._stock_groups.groups))
            self._seen[request_id] = seen
        count = self._prefixes.num_bundles(request_id)
        if count != seen.prefix:  # an order to evict may have taken some
            self._announce(request, seen.prefix, count)
            seen.prefix = count

    def mark_scheduled(self) -> None:
        noted = self._stock_groups.noted_requests
        super().mark_scheduled()
        for request_id in noted:
            self._announce_beside(self._seen[request_id])

    def prepare(self, request: Request, record: SchedulerRequest, processed: int) -> None:
        super().prepare(request, record, processed)
        if (seen := self._seen.get(request.request_id)) is not None:
            self._announce_beside(seen)

    def released(
        self, request_id: str, record: SchedulerRequest, resolved: RetentionPlan
    ) -> tuple[Numbers | int, Numbers | int]:
        found = super().released(request_id, record, resolved)
        if (seen := self._seen.get(request_id)) is not None:  # else its KV came from elsewhere
            self._announce_copied(seen)
        return found

    def leave(self, request_id: str, record: SchedulerRequest) -> Numbers | int:
        others = super().leave(request_id, record)
        if (seen := self._seen.pop(request_id, None)) is not None:
            self._announce_copied(seen)
        return others

    def _announce_copied(self, seen: _Seen) -> None:
        """Announce what an eviction overwrites, if it was copied."""
        self._announce(seen.request, seen.prefix, seen.request.num_prompt_tokens // self._tokens)

    def _announce(self, request: Request, first: int, end: int) -> None:
        """Announce bundles of a prefix, from number `first` up to `end`, that are found whole."""
        kinds, bundles = self._prefixes.kinds, self._pool.bundles
        hashes = self._prefixes.cache.hashes(request)[first:end]
        names = zip(*(kind.named(hashes) for kind in kinds), strict=True)
        found = [[bundles.get(name) for name in of_kinds] for of_kinds in names]
        self._tell(request, self._group, first, found)

    def _announce_beside(self, seen: _Seen) -> None:
        """Announce the bundles that layers beside those that evict have of a request."""
        for index, group in enumerate(self._stock_groups.groups):
            first, found = group.exact_bundles(seen.request, seen.beside[index])
            self._tell(seen.request, group.groups[0], first, [[bundle] for bundle in found])
            seen.beside[index] = first + len(found)

    def _tell(
        self,
        request: Request,
        group: int,
        first: int,
        found: Iterable[Sequence[BlockBundle | None]],
    ) -> None:
        """Add an event for each run of `found` bundles, from block `first` on, not yet
        announced.
        """
        run: list[list[BlockBundle]] = []
        for number, of_block in enumerate([*found, ()], first):
            bundles = [one for one in of_block if one is not None]
            is_known = any(one.announced and one.announced.on_device for one in bundles)
            if bundles and len(bundles) == len(of_block) and not is_known:
                run.append(bundles)
                continue
            if run:
                event = self._stored(request, group, number - len(run), number)
                self._pool.kv_event_queue.append(event)
                for index, of_run in enumerate(run):
                    announced = AnnouncedBlock(self._pool, event, index)
                    for bundle in of_run:
                        bundle.announced = announced
            run = []

    def _stored(self, request: Request, group: int, first: int, end: int) -> BlockStored:
        """Return vLLM's event of a request's blocks from number `first` up to `end`."""
        size, lora = self._tokens, request.lora_request
        before = min(first, 1)
        hashes = self._prefixes.cache.hashes(request)[first - before : end]
        names = [maybe_convert_block_hash(one) for one in hashes]
        starts = range(first * size, end * size, size)
        keys = [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in starts]
        return BlockStored(
            block_hashes=names[before:],
            parent_block_hash=names[0] if before else None,
            token_ids=request.all_token_ids[first * size : end * size],
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=self._pool.medium,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(keys),
            group_idx=group,
            session_id=request.session_id,
        )
