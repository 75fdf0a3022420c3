# SPDX-License-Identifier: Apache-2.0
"""What the first eviction of a prompt overwrites, kept in copies so that others find the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.cache_store import SchedulerRequest
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.plan import Plan, RetentionPlan, overwritten_blocks


class PendingCopy(NamedTuple):
    """Reserved blocks to which the workers copy what an eviction is about to overwrite.

    `first` numbers the first bundle that is copied; `hashes` go from there to the prompt's end.
    """

    first: int
    hashes: list[BlockHash]
    reserved: BlockBundle


class EvictedPrefixes:
    """Reserve blocks before an eviction for what it overwrites, and make bundles of them behind it.

    `pending` has the blocks of requests whose evictions have not been reported yet.
    """

    def __init__(
        self,
        pool: BundlePool,
        cache: PrefixCache,
        layer_blocks: LayerBlocks,
        records: Mapping[str, SchedulerRequest],
    ) -> None:
        self._pool, self._cache, self._layer_blocks = pool, cache, layer_blocks
        self._records = records
        self.pending: dict[str, PendingCopy] = {}

    def reserve(self, requests: Sequence[tuple[Request, int]]) -> dict[str, list[int]]:
        """Reserve blocks for what the evictions in the step just scheduled will overwrite.

        `requests` come to their first eviction in this step; with each, how many bundles it has.
        Returns by request ids of blocks for the workers to copy to (`StepEvictions.copies`), as
        many as the eviction can need, each of the pool of its layer's stage. A request is left out
        if it keeps nothing, if all of its prompt is cached, or if a pool has too few blocks.
        """
        missing = [found for request, own in requests if (found := self._uncached(request, own))]
        reserved: dict[str, list[int]] = {}
        # Between these calls nothing becomes idle, so the latest idle blocks are this step's.
        others = np.zeros(len(self._layer_blocks.stages), np.int64)
        for request_id, plan, first, hashes in missing:
            counts = overwritten_blocks(plan, self._layer_blocks.stages.sizes)
            bundle = self._pool.reserve(counts, others)
            if bundle is not None:
                others += counts
                self.pending[request_id] = PendingCopy(first, hashes, bundle)
                reserved[request_id] = [block.block_id for block in bundle.blocks]
        return reserved

    def _uncached(
        self, request: Request, first: int
    ) -> tuple[str, Plan, int, list[BlockHash]] | None:
        """Return a prompt to keep: id, plan, first bundle to copy, and the hashes from it on."""
        request_id = request.request_id
        terms = self._records[request_id].terms
        if terms.plan is None or request_id in self.pending:
            return None
        if terms.reusable in (0, terms.shareable):
            return None
        hashes = self._cache.hashes(request)[: terms.plan.exact_tokens // self._cache.tokens]
        if self._pool.longest_prefix(hashes) < len(hashes):
            return request_id, terms.plan, first, hashes[first:]
        for block_hash in reversed(hashes[first:]):  # an earlier request's, used once more
            self._pool.touch_bundle(block_hash)
        return None

    def keep(self, request_id: str, resolved: RetentionPlan | None) -> npt.NDArray[np.int64]:
        """Make bundles of the copies and the head's blocks, if the eviction has been reported.

        Returns `[layers]` blocks of the head that are no longer the request's.
        """
        pending = self.pending.pop(request_id, None)
        copies = None if pending is None else self._pool.take_reserved(pending.reserved)
        nothing: npt.NDArray[np.int64] = np.zeros(self._layer_blocks.num_tables, np.int64)
        if pending is None or copies is None or resolved is None:
            self._pool.free_blocks(copies or ())
            return nothing
        if pending.first * self._cache.tokens < resolved.in_place:  # the request still needs them
            self._pool.free_blocks(copies)
            return nothing
        starts = resolved.points[0].skip + resolved.in_place
        return self._cache.keep_evicted(request_id, pending.first, pending.hashes, starts, copies)
