# SPDX-License-Identifier: Apache-2.0
"""What a request finds of its prompt in the cache, what it shows others, what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, KVCacheBlockCopy
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache, copies_of
from vllm_pyramid.kv_cache.request_record import PendingPrefixCopy, SchedulerRequest
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.plan import Plan, RetentionPlan, overwritten_blocks


class PrefixSharing:
    """Prefix caching, as a part of `LockstepCoordinator`.

    Attributes:
        block_copies: of each pipeline stage, that its worker is to make before the step that is
            being scheduled.
    """

    block_pool: BundlePool
    stock_groups: StockGroups
    num_layers: int
    stages: PipelineLayout
    block_copies: list[list[KVCacheBlockCopy]]
    _prefixes: PrefixCache
    _requests: dict[str, SchedulerRequest]
    most_blocks: Callable[[str, int], npt.NDArray[np.int64]]
    # Of requests that published rows in the step being scheduled, how many they had before.
    _rows_before: dict[str, int]

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the blocks of so many tokens, whose KV this step computes at the latest.

        Others may be in this very step: attention reads what all requests of a step have written.
        """
        known = self._requests.get(request.request_id)
        if known is None:
            return
        if self.stock_groups:
            self.stock_groups.note(request, num_computed_tokens, known.suffix)
        if known.released:
            return
        tokens = num_computed_tokens
        if known.shareable is not None:
            tokens = min(tokens, known.shareable)
        if tokens // self._prefixes.tokens <= len(known.rows):
            return  # nearly every request, every step
        if rows := self._prefixes.publish(request, len(known.rows), tokens):
            self._rows_before.setdefault(request.request_id, len(known.rows))
            known.rows.extend(rows)

    def cached_tokens(self, request: Request, most: int) -> int:
        """Tokens of a request without blocks that are in the cache, at most `most`.

        Their blocks are the request's when the next allocation for it succeeds.
        """
        known = self._requests[request.request_id]
        if known.reusable is not None:
            most = min(most, known.reusable)
        shared = most if known.shareable is None else min(most, known.shareable)
        shared_rows = shared // self._prefixes.tokens
        known.hit = self._prefixes.find(request, most, shared_rows)
        least = shared_rows  # that may be found without a copy
        if self.stock_groups:
            del known.hit[self.stock_groups.covered(known.hit, known.suffix) :]
            least = 0
        if len(known.hit) > least:
            # What is copied must not be dissolved for the blocks that this request gets.
            row_blocks = self._prefixes.row_blocks
            needed = row_blocks * (-(-request.num_tokens // self._prefixes.tokens))
            peak = self.most_blocks(request.request_id, request.num_tokens)
            needed = np.minimum(needed, peak)
            needed -= row_blocks * min(shared_rows, len(known.hit))
            free = self.block_pool.free_by_stage()
            free -= row_blocks * len(self.block_pool.idle_rows(known.hit))
            if self.stock_groups:
                tokens = len(known.hit) * self._prefixes.tokens
                needed += self.stock_groups.missing_blocks(
                    request.request_id, request.num_tokens, hit=tokens
                )
                free -= self.stock_groups.source_blocks(known.hit, known.suffix)
            if (needed > free).any():
                del known.hit[least:]
        return len(known.hit) * self._prefixes.tokens

    def _shared_rows(self, request: SchedulerRequest) -> int:
        """Of the rows that a request could begin with, those that it would not copy."""
        if request.shareable is None:
            return len(request.hit)
        return min(len(request.hit), request.shareable // self._prefixes.tokens)

    @property
    def row_blocks(self) -> npt.NDArray[np.int64]:
        """`[stages]`: blocks of a row."""
        return self._prefixes.row_blocks

    def rows_shared(self, request_id: str) -> dict[frozenset[str], int]:
        """Rows that several requests have, by who has them, if this one began with its hit."""
        known = self._requests[request_id]
        hit = known.hit[: self._shared_rows(known)]
        rows = (self.block_pool.rows[name] for name in hit)
        return self._prefixes.holders.shared(request_id, rows)

    def left_tokens(self, request_id: str) -> int:
        """Tokens of a request that others find, or will find when it has evicted."""
        known = self._requests.get(request_id)
        if known is None:
            return 0
        behind = 0 if known.left is None else len(known.left.hashes)
        return (len(known.rows) + behind) * self._prefixes.tokens

    def step_ends(self) -> None:
        """What was published up to now is computed, or will be in the step that was scheduled."""
        for request_id, before in self._rows_before.items():
            for row in self._requests[request_id].rows[before:]:
                row.scheduled = True
        self._rows_before.clear()
        self.stock_groups.step_ends()

    def keep_prompts(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Set blocks aside for what the evictions in the step just scheduled will overwrite.

        Args:
            requests: that come to their first eviction in it.

        Returns:
            By request, ids of blocks for the workers to copy to (`StepEvictions.copies`), as many
            as can be needed, each of the pool of its layer's stage. None of a request that leaves
            nothing behind, or has all of it there, or for which a pool has too few.
        """
        missing = [found for request in requests if (found := self._not_there(request))]
        aside: dict[str, list[int]] = {}
        # Nothing becomes idle between these calls, so the latest are those of this step.
        others = np.zeros(len(self.stages), np.int64)
        for request_id, plan, first, hashes in missing:
            counts = overwritten_blocks(plan, self.stages.sizes)
            row = self.block_pool.set_aside(counts, others)
            if row is not None:
                others += counts
                self._requests[request_id].left = PendingPrefixCopy(first, hashes, row)
                aside[request_id] = [block.block_id for block in row.blocks]
        return aside

    def _not_there(self, request: Request) -> tuple[str, Plan, int, list[BlockHash]] | None:
        """What a prompt leaves behind when it evicts: from which row on, and their hashes."""
        known = self._requests[request.request_id]
        plan, first = known.plan, len(known.rows)
        if plan is None or known.left is not None or known.reusable in (0, known.shareable):
            return None
        hashes = self._prefixes.hashes(request)[: plan.exact_tokens // self._prefixes.tokens]
        if self.block_pool.longest(hashes) < len(hashes):
            return request.request_id, plan, first, hashes[first:]
        for block_hash in reversed(hashes[first:]):  # of an earlier request, and used again
            self.block_pool.touch_row(block_hash)
        return None

    def take_block_copies(self) -> list[list[KVCacheBlockCopy]]:
        """`block_copies` of the step that has just been scheduled."""
        copies, self.block_copies = self.block_copies, [[] for _ in self.stages.ends]
        return copies

    def _fill(
        self, own: Sequence[Sequence[KVCacheBlock]], sources: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        """Let the workers fill blocks with others, both `[layers][blocks]`."""
        ends = zip(self.block_copies, self.stages.starts, self.stages.ends, strict=True)
        for copies, start, end in ends:
            copies += copies_of(sources[start:end], own[start:end])

    def _leave_rows(self, request_id: str, request: SchedulerRequest) -> npt.NDArray[np.int64]:
        """The request does without its rows; `[layers]` blocks that nobody uses any more."""
        ended = self._prefixes.leave(request_id, request.rows) if request.rows else 0
        request.rows = []
        freed: npt.NDArray[np.int64] = self._prefixes.blocks * ended
        return freed

    def _leave_behind(
        self, request_id: str, request: SchedulerRequest, resolved: RetentionPlan | None
    ) -> npt.NDArray[np.int64]:
        """Copies and the head's blocks become rows; `[layers]` blocks of the head that do.

        Args:
            settled: None if the worker has not said that it evicted: then nothing was copied.
        """
        left, request.left = request.left, None
        copies = None if left is None else self.block_pool.take(left.blocks)
        if left is None or copies is None or resolved is None:
            self.block_pool.free_blocks(copies or ())
            return np.zeros(self.num_layers, np.int64)
        return self._prefixes.leave_behind(
            request_id, left.first, left.hashes, resolved.points[0].skip, copies
        )

    def _withdraw_rows(self, request_id: str, request: SchedulerRequest) -> None:
        """Take back rows that were to be computed in the step from which it is preempted.

        Nobody has been admitted since, so nobody else uses them.
        """
        before = self._rows_before.pop(request_id, len(request.rows))
        self._prefixes.withdraw(request_id, request.rows[before:])
        del request.rows[before:]
