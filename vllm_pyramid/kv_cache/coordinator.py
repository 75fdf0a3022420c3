# SPDX-License-Identifier: Apache-2.0
"""All layers' blocks at the price of one layer's.

Block boundaries lie at the same token positions in every layer, so all layers of a request need
their next block in the same step. vLLM's coordinator asks each group in turn, which for 32 groups
and hundreds of requests costs several times the rest of the step; here one counter a request
answers for all of them.

Layers without V on the device have blocks of twice the tokens, so every second of their neighbours'
boundaries is theirs too: the same counter, halved, answers for them. A hybrid model's other layers,
the companions, need their next block at some of these boundaries, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from vllm_pyramid.compat.block_pool import block_pool
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.layer_manager import LayerKVCacheManager
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout, PipelinePools
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.prefix_sharing import PrefixSharing
from vllm_pyramid.kv_cache.request_plans import RequestPlans
from vllm_pyramid.kv_cache.request_record import SchedulerRequest
from vllm_pyramid.kv_cache.session_cache import SessionCache
from vllm_pyramid.kv_cache.session_resume import SessionResume
from vllm_pyramid.kv_cache.stock_groups import StockGroups
from vllm_pyramid.plan import EvictionPoint, IntArray, RetentionPlan, peak_blocks

_NO_BOUND = np.array(np.iinfo(np.int64).max)


class LockstepCoordinator(
    RequestPlans, PrefixSharing, SessionResume, KVCacheCoordinatorNoPrefixCache
):
    """KV cache coordinator for groups of one layer each that grow together.

    "Layers" are those that evict, from the bottom; what else a model has is in `stock_groups`.

    A request's head blocks go back to the pool when its whole prompt has been processed and a plan
    was given for it (`set_plan`); until then, and without a plan, it is full attention. An open
    plan is settled by the worker's report (`confirm`) and open again after a preemption. Where the
    plan says so, further blocks go back at later evictions, each on the worker's word again.

    Attributes:
        layers: the model's own numbers of the layers. layer_managers: of their blocks.
        stages: which of them each pipeline stage has; stages have pools of their own.
        companions: the other layers of a hybrid model.
        held_blocks: `[layers]` int64, blocks of the pool held by all requests, per layer.
        skipped_tokens: `[layers]` int64, tokens given back by requests that still hold blocks.
        blocks_freed: `[layers]` int64, blocks given back by eviction since the start; a shared one
            counts for each request that gives it back.
        tokens_evicted: `[layers]` int64, tokens evicted since the start; counted when the worker
            confirms, since a request that ends there gives all its blocks back at once.
        num_evictions: evictions since the start: of prompts, and later ones.
        num_releases: how often blocks have gone back to the pool: by an eviction, an end or a
            preemption.
    """

    block_pool: BundlePool

    def __init__(self, *, hash_block_size: int, **kwargs: Any) -> None:
        self.stages = _stages_of(kwargs["kv_cache_config"])
        make = BundlePool if len(self.stages) == 1 else partial(PipelinePools, stages=self.stages)
        with block_pool(make):
            super().__init__(hash_block_size=hash_block_size, **kwargs)
        own = [
            (manager.kv_cache_spec.layer_idx, group, manager)
            for group, manager in enumerate(self.single_type_managers)
            if isinstance(manager, LayerKVCacheManager)
        ]
        own.sort(key=itemgetter(0))
        assert [layer for layer, _, _ in own] == list(range(len(own))), "layers are missing"
        self.layer_managers = tuple(manager for _, _, manager in own)
        self._groups = [group for _, group, _ in own]
        specs = [manager.kv_cache_spec for manager in self.layer_managers]
        self.layers = [spec.model_layer for spec in specs]
        self.num_layers = len(specs)
        self.block_sizes = np.array([spec.block_size for spec in specs], np.int64)
        others = [
            (group, manager)
            for group, manager in enumerate(self.single_type_managers)
            if group not in self._groups
        ]
        self.stock_groups = StockGroups(others, self.block_pool)
        if not others:  # blocks of layers are then given out as those of groups
            assert self._groups == list(range(len(own))), "groups are not in the order of layers"
        beside = self.stock_groups.block_sizes(kwargs["max_model_len"])
        self.block_size = min([int(self.block_sizes.min()), *beside])
        if any(size % self.block_size for size in (*self.block_sizes.tolist(), *beside)):
            raise ValueError(
                f"this model has layers with blocks of {self.block_sizes.tolist()} tokens, and "
                f"others of {beside}, which cannot run in lockstep: serve it with --kv-policy none"
            )
        self._ratios = self.block_sizes // self.block_size
        # Of each stage, for each ratio, how many layers have it.
        starts, ends = self.stages.starts, self.stages.ends
        self._layers_of_ratio = [
            dict(Counter(self._ratios[start:end].tolist()))
            for start, end in zip(starts, ends, strict=True)
        ]
        # Beside companions, and without prefix caching, vLLM's size of a hash may be anything.
        self._hashes_fit = not others or self.largest_block % hash_block_size == 0
        if not self._hashes_fit:
            hash_block_size = self.largest_block
        self._hash_tokens = hash_block_size
        self._prefixes = PrefixCache(
            self.block_pool, self.layer_managers, self.block_sizes, hash_block_size, self.stages
        )
        self._entries_per_row = self._prefixes.tokens // self.block_size
        self._states = SessionCache(self.block_pool, self.layer_managers, self._prefixes.tokens)
        self.origins = {}
        self._requests = {}
        self._rows_before = {}
        self.block_copies = [[] for _ in starts]
        # The request whose next allocation fails, as if blocks were missing.
        self.refused: str | None = None
        self.held_blocks = np.zeros(self.num_layers, np.int64)
        self.skipped_tokens = np.zeros(self.num_layers, np.int64)
        self.blocks_freed = np.zeros(self.num_layers, np.int64)
        self.tokens_evicted = np.zeros(self.num_layers, np.int64)
        self.num_evictions = 0
        self.num_releases = 0

    def share_prefixes(self) -> bool:
        """Let prefixes be found; False if the companions cannot."""
        if not self.stock_groups:
            return True
        return self._hashes_fit and self.stock_groups.share(self.largest_block, self._hash_tokens)

    # vLLM's contract --------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Blocks that all layers together need for `num_tokens` tokens of the request.

        Args:
            apply_admission_cap: count only what they hold at any one time on the way there; asked
                for before a request is let in, or comes back after a preemption.
        """
        if request_id == self.refused:
            self.refused = None
            return self.block_pool.num_gpu_blocks + 1
        request = self._known(request_id)
        have, need = request.num_blocks, cdiv(num_tokens, self.block_size)
        if request.found is not None:  # and so there is one stage, and one size of its blocks
            heads = self._states.heads(request.found.skip)
            blocks = int((cdiv(num_tokens, self._prefixes.tokens) - heads).sum())
            most = self.most_blocks(request_id, num_tokens) if apply_admission_cap else [blocks]
            hit = request.found.tokens
            return min(blocks, int(most[0])) + self.stock_groups.missing_blocks(
                request_id, num_tokens, capped=apply_admission_cap, hit=hit
            )
        if request.hit:
            have = self._shared_rows(request) * self._entries_per_row
        if need <= have and not request.hit:
            return 0  # nearly every request, every step
        beside = 0
        if self.stock_groups:
            hit = len(request.hit) * self._prefixes.tokens
            beside = self.stock_groups.missing_blocks(
                request_id, num_tokens, capped=apply_admission_cap, hit=hit
            )
        by_stage = [
            sum(
                layers * (cdiv(need, ratio) - cdiv(have, ratio))
                for ratio, layers in of_stage.items()
            )
            for of_stage in self._layers_of_ratio
        ]
        capped = apply_admission_cap and request.plan is not None
        pool = self.block_pool
        most = self.most_blocks(request_id, num_tokens) if capped else _NO_BOUND
        needed = np.minimum(by_stage, most)
        if request.hit and pool.bottleneck(needed) <= pool.get_num_free_blocks():
            # Shared blocks that nobody uses count as free, and will not any more.
            idle = len(pool.idle_rows(request.hit[: self._shared_rows(request)]))
            # The most that it holds has what it shares among it.
            needed = np.minimum(by_stage + self.row_blocks * idle, most)
        return pool.bottleneck(needed) + beside

    def most_blocks(
        self, request_id: str, num_tokens: int, late: int = 0, *, evicted: bool = False
    ) -> npt.NDArray[np.int64]:
        """Blocks that a request holds at most until so many of its tokens are computed: `[stages]`.

        Args:
            late, evicted: see `peak_blocks`.
        """
        plan = self.plan_of(request_id)
        if not (plan.inner or plan.every) or num_tokens < plan.prompt_len:
            return self.stages.sums(-(-num_tokens // self.block_sizes))
        sizes = self.stages.sizes
        of_layers = peak_blocks(plan, num_tokens, self.block_sizes, late, sizes, evicted=evicted)
        return self.stages.sums(of_layers)

    def waits_for_blocks(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request lacks blocks that its own last eviction is about to give back.

        Their step is under way. To preempt for them would be wrong: a request alone in the pool
        would preempt itself, come to the same point again, and never get further. What it can
        give back now, it gives back.

        Args:
            num_tokens: that it is to have computed after the next step.
        """
        request_id, computed = request.request_id, request.num_computed_tokens
        known = self._requests[request_id]
        if known.due is None or computed < known.due:
            return False  # nearly every request, every step
        assert known.plan is not None
        processed = computed - request.num_in_flight_tokens
        self.remove_skipped_blocks(request_id, processed)
        if known.plan.evictions_by(processed) == known.plan.evictions_by(computed):
            return False
        needed = self.get_num_blocks_to_allocate(request_id, num_tokens)
        return needed > self.block_pool.get_num_free_blocks()

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> None:
        """Begin the request's tables with what `cached_tokens` or `resumable_tokens` has found."""
        assert not any(new_computed_blocks) and num_external_computed_tokens == 0
        request = self._requests[request_id]
        if request.found is not None:
            assert num_local_computed_tokens == request.found.tokens
            self._resume(request_id, request, request.found)
            return
        assert num_local_computed_tokens == len(request.hit) * self._prefixes.tokens
        assert not request.num_blocks and not request.rows
        shared = self._shared_rows(request)
        sources = self._prefixes.blocks_of(request.hit[shared:])
        if shared:
            request.rows, revived = self._prefixes.enter(request_id, request.hit[:shared])
            request.num_blocks = shared * self._entries_per_row
            self.held_blocks += self._prefixes.blocks * revived
        for block_hash in reversed(request.hit[shared:]):
            self.block_pool.touch_row(block_hash)
        if self.stock_groups and request.hit:
            copies = self.stock_groups.enter(request_id, request.hit, request.suffix)
            self.block_copies[0] += copies  # there is one stage
        if sources:
            new_blocks = self.allocate_new_blocks(
                request_id, num_local_computed_tokens, num_local_computed_tokens
            )
            self._fill([new_blocks[group] for group in self._groups], sources)
        request.hit = []

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """The next blocks of every group, `[groups][new blocks]`; usually none: an empty tuple."""
        request = self._requests.get(request_id)
        have = 0 if request is None else request.num_blocks
        if (need := cdiv(num_tokens, self.block_size)) <= have:
            return ()
        if request is None:  # without a plan
            request = self._requests[request_id] = SchedulerRequest()
        missing = -(-need // self._ratios) - -(-have // self._ratios)
        ends = missing.cumsum().tolist()
        pool_blocks = self.block_pool.get_blocks_of_layers(missing)
        request.num_blocks = need
        self.held_blocks += missing
        new_blocks = tuple(
            pool_blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)
        )
        for manager, blocks in zip(self.layer_managers, new_blocks, strict=True):
            manager.req_to_blocks[request_id].extend(blocks)
            if manager.records_new_block_ids:
                manager.new_block_ids.extend(block.block_id for block in blocks)
        if not self.stock_groups:
            return new_blocks
        of_groups = self.stock_groups.allocate(request_id, num_tokens)
        of_groups |= dict(zip(self._groups, new_blocks, strict=True))
        return tuple(of_groups.get(group, []) for group in range(len(self.single_type_managers)))

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give head blocks back: when the whole prompt has been processed, and at later evictions.

        vLLM counts processed tokens here, not scheduled ones, so the step that compacts the cache
        has ended and no step in flight still reads the head.
        """
        if self.stock_groups:
            self.stock_groups.drop_unseen(request_id, processed_computed_tokens)
        request = self._requests.get(request_id)
        if request is None or request.due is None or processed_computed_tokens < request.due:
            return
        if not request.num_blocks:
            return  # it is about to begin with a state, behind evictions of others
        resolved, number = self._releasable(request_id, request, processed_computed_tokens)
        request.due = resolved.next_eviction(processed_computed_tokens)
        skip = resolved.skip_after(number)
        shared = self._prefixes.blocks * len(request.rows)
        left = self._leave_behind(request_id, request, resolved)
        unused = left + self._leave_rows(request_id, request)
        own = np.zeros(self.num_layers, np.int64)
        for layer, (manager, head) in enumerate(
            zip(self.layer_managers, (skip // self.block_sizes).tolist(), strict=True)
        ):
            own[layer] = manager.release_head(request_id, head)
        self.num_releases += 1
        self.held_blocks -= unused + own
        self.blocks_freed += shared + left + own
        self.skipped_tokens += skip - resolved.skip_after(request.released)
        request.released = number

    def _releasable(
        self, request_id: str, request: SchedulerRequest, processed: int
    ) -> tuple[RetentionPlan, int]:
        """The settled plan and the eviction whose head may go now.

        Raises:
            RuntimeError: the worker was to evict by now and has not said so.
        """
        plan, resolved, confirmed = request.plan, request.resolved, request.confirmed
        assert plan is not None
        if resolved is None and isinstance(plan, RetentionPlan):
            resolved = plan  # perhaps it had nothing to give yet, and so nothing to report
        if resolved is not None:
            number = resolved.evictions_by(processed)
            skip = resolved.skip_after(number)
            if number <= confirmed or (skip == resolved.skip_after(confirmed)).all():
                return resolved, number
        raise RuntimeError(
            f"request {request_id}: {processed} of its tokens are processed but the worker did not "
            f"evict (its prompt has {plan.prompt_len} tokens, and its latest eviction was number "
            f"{confirmed}). Eviction was asked for and did not happen, so the engine stops; start "
            "with --enforce-eager to rule out captured graphs, and report this"
        )

    def free(self, request_id: str) -> None:
        """Give all blocks back (the request has finished or is preempted); the plan stays."""
        self._forget_blocks(request_id)
        super().free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As `free`, but the caller returns the blocks to the pool."""
        self._forget_blocks(request_id)
        return super().pop_blocks_for_free(request_id)

    def _forget_blocks(self, request_id: str) -> None:
        self.num_releases += 1
        self.stock_groups.forget(request_id)
        if (request := self._requests.get(request_id)) is None:
            return
        self._withdraw_rows(request_id, request)
        self._leave_behind(request_id, request, request.resolved)
        in_rows = self._prefixes.blocks * len(request.rows)
        self.held_blocks -= -(-request.num_blocks // self._ratios) - in_rows
        self.held_blocks -= self._leave_rows(request_id, request)
        self._leave_state(request_id, request)
        plan = request.resolved or request.plan
        if request.released and isinstance(plan, RetentionPlan):
            skip = plan.skip_after(request.released)
            self.held_blocks += skip // self.block_sizes
            self.skipped_tokens -= skip
        if request.plan is None:
            del self._requests[request_id]
            return
        self.set_plan(
            request_id,
            request.plan,
            request.policy,
            request.min_tokens,
            request.shareable,
            request.reusable,
            request.conversation,
        )

    def reset_prefix_cache(self) -> bool:
        """Of all stages at once: vLLM would ask the pool of each, which has no rows."""
        return self.block_pool.reset_prefix_cache()

    def new_step_starts(self) -> None:
        """The managers keep nothing per step."""

    # Sizes ------------------------------------------------------------------------------------

    def blocks_of(self, point: EvictionPoint) -> IntArray:
        """Return the blocks that each layer holds after an eviction, `[layers]`."""
        return point.blocks_in(self.block_sizes)

    def whole_blocks(self, tokens: npt.NDArray[np.int64], stage: int = 0) -> npt.NDArray[np.int64]:
        """Blocks of a stage's layers for so many tokens with nothing given back, any shape."""
        blocks = -(-tokens // self.block_size)
        total = np.zeros_like(blocks)
        for ratio, layers in self._layers_of_ratio[stage].items():
            total += layers * -(-blocks // ratio)
        return total

    @property
    def usable_blocks(self) -> npt.NDArray[np.int64]:
        """Blocks of each stage's pool that are free or a request's: all but what somebody keeps
        back.
        """
        held = self.stages.sums(self.held_blocks) + self.stock_groups.held_blocks
        return self.block_pool.free_by_stage() + held

    @property
    def largest_block(self) -> int:
        """Tokens of the largest block: multiples of it end blocks in all layers."""
        return int(self.block_sizes.max())

    @property
    def full_block_size(self) -> int:
        """Tokens of a block of K and V."""
        size: int = self.layer_managers[0].kv_cache_spec.full_block_size
        return size

    def full_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take where nothing is evicted and V is on the device."""
        return self.num_layers * cdiv(num_tokens, self.full_block_size)

    def blocks_held(self, request_id: str) -> list[int]:
        """Blocks the request holds, per layer, counted from its block lists."""
        return [manager.num_held(request_id) for manager in self.layer_managers]


def _stages_of(config: KVCacheConfig) -> PipelineLayout:
    specs = (group.kv_cache_spec for group in config.kv_cache_groups)
    return PipelineLayout.of(next(spec for spec in specs if hasattr(spec, "stages")))
