# SPDX-License-Identifier: Apache-2.0
"""The blocks of all layers at the price of one layer's.

Block boundaries lie at the same token positions in every layer, so all layers of a request need
their next block in the same step, and one counter per request answers for all of them. vLLM's
coordinator would ask each group in turn.

Layers without V on the device have blocks of twice the tokens, so they share every second boundary
of the other layers: the same counter, halved, answers for them (`LayerBlocks`). The layers that do
not evict (`StockGroups`) need their next block at some of these boundaries, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_pyramid.compat.block_pool import block_pool
from vllm_pyramid.kv_cache.announcing_stores import AnnouncingStores
from vllm_pyramid.kv_cache.block_copies import BlockCopies
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.cache_store import SchedulerRequest
from vllm_pyramid.kv_cache.counters import CacheCounters
from vllm_pyramid.kv_cache.head_layout import make_layout
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.new_blocks import extend_tables
from vllm_pyramid.kv_cache.pipeline_pools import PipelinePools
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.prefix_store import PrefixStore
from vllm_pyramid.kv_cache.request_plans import RequestPlans
from vllm_pyramid.kv_cache.session_cache import SessionCache
from vllm_pyramid.kv_cache.session_store import SessionStore
from vllm_pyramid.kv_cache.spec import stages_of
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.kv_cache.stores import Stores
from vllm_pyramid.plan import RetentionPlan

_UNKNOWN = SchedulerRequest()  # read only


class LockstepCoordinator(KVCacheCoordinatorNoPrefixCache):
    """KV cache coordinator for groups of one layer each that grow together.

    "Layers" are the layers that evict, from the bottom; `stock_groups` has the model's others.
    Plans and counters have a number for each of their tables (`layout.py`).

    A request with a plan gives head blocks back when its whole prompt has been processed, and at
    later evictions if the plan has any, each time after the worker's confirmation. Until then, and
    without a plan, it is full attention. The worker's report resolves a deferred plan; a preemption
    makes it deferred again.

    Attributes:
        layers: the model's own numbers of the layers.
        stores: what outlives requests. sessions, prefixes: those that admission and reports ask.
        block_copies: copies that the workers make before the step that is being scheduled.
        blocked_request: the request whose next allocation fails as if blocks were missing.
    """

    block_pool: BundlePool

    def __init__(self, *, hash_block_size: int, **kwargs: Any) -> None:
        stages = stages_of(kwargs["kv_cache_config"])
        make = BundlePool if len(stages) == 1 else partial(PipelinePools, stages=stages)
        with block_pool(make):
            super().__init__(hash_block_size=hash_block_size, **kwargs)
        found = self.layout = make_layout(self.single_type_managers)
        self.layer_specs = found.specs
        self.layer_managers, self._groups, self.layers = found.managers, found.groups, found.layers
        self.stock_groups = StockGroups(found.others, self.block_pool)
        stock_sizes = self.stock_groups.block_sizes(kwargs["max_model_len"])
        sizes, full_size = [one.block_size for one in found.specs], found.specs[0].full_block_size
        self.layer_blocks = LayerBlocks(sizes, stages, full_size, stock_sizes)
        self._unit = self.layer_blocks.unit
        # With stock groups and without prefix caching, vLLM may choose any size of a hash.
        self._hashes_fit = not found.others or self.layer_blocks.largest % hash_block_size == 0
        self._hash_tokens = hash_block_size if self._hashes_fit else self.layer_blocks.largest
        self.counters = CacheCounters(self.layer_blocks.num_tables)
        self.plans = RequestPlans(self.counters)
        self._records = self.plans.records
        self.block_copies = BlockCopies(stages)
        pool, groups, layer_blocks = self.block_pool, self.stock_groups, self.layer_blocks
        kinds = [
            PrefixCache(pool, found, layer_blocks, self._hash_tokens, kind)
            for kind in found.prefix_kinds()
        ]
        cache = kinds[0]
        self._bundle_tokens = cache.tokens
        copies, counters = self.block_copies, self.counters
        self.prefixes = PrefixStore(
            pool, kinds, groups, layer_blocks, self.plans, copies, counters, self._grow
        )
        sessions = SessionCache(pool, self.layer_managers, cache.tokens)
        self.sessions = SessionStore(
            pool, sessions, self.prefixes, groups, layer_blocks, copies, counters
        )
        self.stores = Stores(pool, (self.sessions, self.prefixes))
        if pool.enable_kv_cache_events:
            self.stores = AnnouncingStores(
                pool, (self.sessions, self.prefixes), self.prefixes, groups, found.groups[0]
            )
        self.blocked_request: str | None = None

    def share_prefixes(self) -> bool:
        """Let prefixes be found from now on; return False if the stock groups cannot."""
        if not self.stock_groups:
            return True
        return self._hashes_fit and self.stock_groups.share(self._bundle_tokens, self._hash_tokens)

    # vLLM's contract --------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Return the blocks that all layers together need for `num_tokens` tokens of the request.

        With `apply_admission_cap` count only the most blocks that they hold at any one time on the
        way there; vLLM asks so before a request starts, or comes back after a preemption.
        """
        if request_id == self.blocked_request:
            self.blocked_request = None
            return self.block_pool.num_gpu_blocks + 1
        record = self._records.get(request_id, _UNKNOWN)
        if record.found is not None:
            store, hit = record.found
            return store.blocks_needed(
                request_id, record, hit, num_tokens, capped=apply_admission_cap
            )
        have, need = record.num_blocks, cdiv(num_tokens, self._unit)
        if need <= have:
            return 0  # nearly every request, every step
        of_stock = 0
        if self.stock_groups:
            of_stock = self.stock_groups.missing_blocks(
                request_id, num_tokens, capped=apply_admission_cap
            )
        needed: npt.NDArray[np.int64] | list[int] = self.layer_blocks.missing(have, need)
        plan = record.terms.plan
        if apply_admission_cap and plan is not None:
            needed = np.minimum(needed, self.layer_blocks.most(plan, num_tokens))
        return self.block_pool.bottleneck(needed) + of_stock

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let other requests find blocks whose KV this step computes at the latest."""
        self.stores.publish(request, num_computed_tokens)

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> None:
        """Begin the request's tables with what was found for it."""
        record = self._records[request_id]
        tokens = 0 if record.found is None else record.found.hit.tokens
        later = record.found is not None and record.found.store.loads_later
        expected = (0, tokens) if later else (tokens, 0)
        began = num_local_computed_tokens, num_external_computed_tokens
        if any(new_computed_blocks) or record.found is None or began != expected:
            raise RuntimeError(
                f"request {request_id}: {expected} tokens were found for it, here and by a "
                f"connector, and vLLM begins with {began}, or with blocks of its own; report this"
            )
        store, hit = record.found
        store.enter(request_id, record, hit)
        record.found, record.began = None, tokens

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Return the next blocks of every group, `[groups][new blocks]`; usually an empty tuple."""
        record = self._records.get(request_id)
        have = 0 if record is None else record.num_blocks
        if (need := cdiv(num_tokens, self._unit)) <= have:
            return ()
        if record is None:  # without a plan
            record = self._records[request_id] = SchedulerRequest()
        missing, ends = self.layer_blocks.growth(have, need)
        pool_blocks = self.block_pool.get_blocks_of_layers(ends)
        record.num_blocks = need
        self.counters.held_blocks += missing
        if not record.tables:
            record.tables = self.layout.vllm_tables(request_id)
        new_blocks = extend_tables(record.tables, pool_blocks, ends, units=need - have)
        for layer, manager in self.layout.recording:
            manager.new_block_ids.extend(block.block_id for block in new_blocks[layer])
        if not self.stock_groups:
            return new_blocks
        by_group = self.stock_groups.allocate(request_id, num_tokens)
        by_group |= zip(self._groups, new_blocks, strict=True)
        return tuple(by_group.get(group, []) for group in range(len(self.single_type_managers)))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give head blocks back: after the whole prompt is processed, and at later evictions.

            before   [ bundles, shared or kept ][ own head ][ own, survivors moved here ]
            after    [ null                    ][ null     ][ own                       ]

        Blocks that stay in place go to the end of the head first (`Layout.move_front`).

        vLLM counts processed tokens here, not scheduled ones, so the step that compacts the cache
        has ended and no step in flight still reads the head.
        """
        if self.stock_groups:
            self.stock_groups.drop_unseen(request_id, processed_computed_tokens)
        record = self._records.get(request_id)
        if (
            record is None
            or record.next_release_at is None
            or processed_computed_tokens < record.next_release_at
        ):
            return
        if not record.num_blocks:
            return  # it is about to begin with a session, behind evictions of another request
        resolved, number = self.plans.next_release(request_id, record, processed_computed_tokens)
        record.next_release_at = resolved.next_eviction(processed_computed_tokens)
        skip = resolved.skip_after(number)
        left, unused = self.stores.released(request_id, record, resolved)
        before, heads = resolved.skip_after(record.released), skip // self.layer_blocks.block_sizes
        if resolved.in_place:
            size = self.layer_blocks.largest
            old, count = before.astype(np.int64) // size, resolved.in_place // size
            self.layout.move_front(request_id, old, heads, count)
        own = self.layout.release_heads(request_id, heads)
        counters = self.counters
        counters.num_releases += 1
        counters.held_blocks -= unused + own
        counters.blocks_freed += left + own
        counters.skipped_tokens += skip - before
        record.released = number

    def _grow(self, request_id: str, num_tokens: int) -> list[Sequence[KVCacheBlock]]:
        """Give a request tables for `num_tokens`; returns the new blocks, `[tables][blocks]`."""
        return self.layout.new_blocks(self.allocate_new_blocks(request_id, num_tokens, num_tokens))

    def free(self, request_id: str) -> None:
        """Give all blocks back: the request has finished or is preempted. Its terms stay."""
        self._forget_blocks(request_id)
        super().free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Take all blocks from a request, as `free` does; the caller returns them to the pool."""
        self._forget_blocks(request_id)
        return super().pop_blocks_for_free(request_id)

    def _forget_blocks(self, request_id: str) -> None:
        counters = self.counters
        counters.num_releases += 1
        self.stock_groups.forget(request_id)
        if (record := self._records.get(request_id)) is None:
            return
        counters.held_blocks -= self.layer_blocks.of_units(record.num_blocks)
        counters.held_blocks += self.stores.leave(request_id, record)
        plan = record.resolved or record.terms.plan
        if record.released and isinstance(plan, RetentionPlan):
            skip = plan.skip_after(record.released)
            counters.held_blocks += skip // self.layer_blocks.block_sizes
            counters.skipped_tokens -= skip
        self.plans.restart(request_id)

    def reset_prefix_cache(self) -> bool:
        """Dissolve all bundles and empty the tier; False, and no change, while requests hold
        blocks.
        """
        done = self.block_pool.reset_prefix_cache()
        if done:
            self.block_pool.tier.clear()
        return done

    def new_step_starts(self) -> None:
        """Do nothing: the managers keep nothing per step."""

    # The scheduler's questions ------------------------------------------------------------------

    def waits_for_blocks(self, request: Request, num_tokens: int) -> bool:
        """Return whether a running request lacks blocks that its own last eviction gives back.

        The step of that eviction is under way. Preempting for these blocks would be wrong: a
        request alone in the pool would preempt itself, come to the same point again, and never get
        further. The request gives back now what it can. `num_tokens` are computed after the next
        step.
        """
        request_id, computed = request.request_id, request.num_computed_tokens
        record = self._records[request_id]
        if record.next_release_at is None or computed < record.next_release_at:
            return False  # nearly every request, every step
        plan = self.plans.of(request_id)
        processed = computed - request.num_in_flight_tokens
        self.remove_skipped_blocks(request_id, processed)
        if plan.evictions_by(processed) == plan.evictions_by(computed):
            return False
        needed = self.get_num_blocks_to_allocate(request_id, num_tokens)
        return needed > self.block_pool.get_num_free_blocks()

    def save(self, request: Request) -> None:
        """Let the stores save what a request that has ended holds, once its blocks are freed."""
        request_id = request.request_id
        record = self._records.get(request_id)
        if record is None or not record.num_blocks:
            return
        if not self.stores.saves(record):
            return
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        processed = min(computed, request.num_tokens)
        self.remove_skipped_blocks(request_id, processed)
        self.stores.prepare(request, record, processed)

    @property
    def usable_blocks(self) -> npt.NDArray[np.int64]:
        """Return each stage's blocks that are free or a request's, `[stages]`."""
        held = self.layer_blocks.stages.sums(self.counters.held_blocks)
        return self.block_pool.free_by_stage() + held + self.stock_groups.held_blocks

    def blocks_held(self, request_id: str) -> list[int]:
        """Count the blocks that the request holds in each of its tables."""
        return self.layout.blocks_held(request_id)
