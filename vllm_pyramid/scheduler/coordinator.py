# SPDX-License-Identifier: Apache-2.0
"""All layers' blocks at the price of one layer's.

Block boundaries lie at the same token positions in every layer, so all layers of a request need
their next block in the same step. vLLM's coordinator asks each group in turn, which for 32 groups
and hundreds of requests costs several times the rest of the step; here one counter a request
answers for all of them.

Layers without V on the device have blocks of twice the tokens, so every second of their neighbours'
boundaries is theirs too: the same counter, halved, answers for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_pyramid.compat.coordinator import block_pool
from vllm_pyramid.plans import Eviction, IntArray, Plan, RetentionPlan
from vllm_pyramid.scheduler.manager import LayerKVCacheManager
from vllm_pyramid.scheduler.prefixes import Prefixes, copies_of
from vllm_pyramid.scheduler.request import SchedulerRequest
from vllm_pyramid.scheduler.rows import RowPool
from vllm_pyramid.scheduler.sharing import PrefixSharing


class LockstepCoordinator(PrefixSharing, KVCacheCoordinatorNoPrefixCache):
    """KV cache coordinator for groups of one layer each that grow together.

    A request's head blocks go back to the pool when its whole prompt has been processed and a plan
    was given for it (`set_plan`); until then, and without a plan, it is full attention. An open
    plan is settled by the worker's report (`confirm`) and open again after a preemption. Where the
    plan says so, further blocks go back at later evictions, each on the worker's word again.

    Attributes:
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

    single_type_managers: tuple[LayerKVCacheManager, ...]  # type: ignore[assignment]
    block_pool: RowPool

    def __init__(self, *, hash_block_size: int, **kwargs: Any) -> None:
        with block_pool(RowPool):
            super().__init__(hash_block_size=hash_block_size, **kwargs)
        self.block_sizes = np.array(self.group_block_sizes, np.int64)
        self.block_size = int(self.block_sizes.min())
        assert not (self.block_sizes % self.block_size).any(), (
            f"layers with block sizes {self.block_sizes.tolist()} cannot run in lockstep"
        )
        self._ratios = self.block_sizes // self.block_size
        # For each ratio how many layers have it: one entry, or two.
        self._layers_of_ratio = dict(Counter(self._ratios.tolist()))
        layers = [manager.kv_cache_spec.layer_idx for manager in self.single_type_managers]
        assert layers == list(range(len(layers))), (
            f"groups are not in the order of layers: {layers}"
        )
        self.num_layers = len(self.single_type_managers)
        self._prefixes = Prefixes(
            self.block_pool, self.single_type_managers, self.block_sizes, hash_block_size
        )
        self._entries_per_row = self._prefixes.tokens // self.block_size
        self._requests = {}
        self._rows_before = {}
        self.block_copies = []
        # The request whose next allocation fails, as if blocks were missing.
        self.refused: str | None = None
        self.held_blocks = np.zeros(self.num_layers, np.int64)
        self.skipped_tokens = np.zeros(self.num_layers, np.int64)
        self.blocks_freed = np.zeros(self.num_layers, np.int64)
        self.tokens_evicted = np.zeros(self.num_layers, np.int64)
        self.num_evictions = 0
        self.num_releases = 0

    # Plans ------------------------------------------------------------------------------------

    def set_plan(
        self,
        request_id: str,
        plan: Plan,
        policy: str = "",
        min_tokens: int | None = None,
        shareable: int | None = 0,
        reusable: int | None = 0,
    ) -> None:
        """Say what the request keeps once its prompt is processed, or that it will be solved.

        Args:
            policy, min_tokens, shareable, reusable: what the plan is of; see `SchedulerRequest`.
        """
        assert plan.num_layers == self.num_layers, (plan.num_layers, self.num_layers)
        due = plan.exact_tokens if plan.evicts else None
        self._requests[request_id] = SchedulerRequest(
            plan, policy, min_tokens, shareable, reusable, due=due
        )

    def plan_of(self, request_id: str) -> Plan:
        """The plan that `set_plan` was given."""
        plan = self._requests[request_id].plan
        assert plan is not None, f"{request_id} has no plan"
        return plan

    def policy_name(self, request_id: str) -> str:
        """The policy that `set_plan` was given."""
        return self._requests[request_id].policy

    def min_tokens(self, request_id: str) -> int | None:
        """The floor that `set_plan` was given."""
        return self._requests[request_id].min_tokens

    def forget_plan(self, request_id: str) -> None:
        """Drop the plan of a request that has finished."""
        if (request := self._requests.get(request_id)) is None:
            return
        request.plan = request.due = None
        if not request.num_blocks:
            del self._requests[request_id]

    def confirm(self, request_id: str, eviction: Eviction) -> None:
        """The worker reports what it evicted, and the lengths where it has solved them.

        Raises:
            RuntimeError: that is not what the plan says, or not what an open plan promised; blocks
                freed by the plan would then be blocks that the worker still reads.
        """
        request = self._requests.get(request_id)
        if request is None or request.plan is None or not request.num_blocks:
            return  # finished, or preempted while the step ran; it will evict again
        if not request.plan.evicts:
            return
        settled, before = request.settled, request.confirmed
        if settled is None or eviction.keep is not None:
            settled = _settled(request_id, request.plan, eviction.keep)
        number = eviction.number
        gone = np.zeros_like(settled.skip)
        if number > before:
            gone = settled.skip_after(number) - settled.skip_after(before)
        expected = int(gone.sum())
        if eviction.tokens != expected:
            raise RuntimeError(
                f"request {request_id}: the worker evicted {eviction.tokens} tokens, the plan says "
                f"{expected} at eviction {number} after {before}; scheduler and worker disagree "
                "about the KV policy; report this"
            )
        request.settled, request.confirmed = settled, number
        self.num_evictions += bool(expected)
        self.tokens_evicted += gone

    def confirmed_plan(self, request_id: str) -> RetentionPlan | None:
        """What the request keeps, once the worker has moved its survivors: at the prompt's end."""
        return self._known(request_id).settled

    def confirmed_number(self, request_id: str) -> int:
        """The latest eviction for which the worker has moved the request's survivors, or 0."""
        return self._known(request_id).confirmed

    def is_confirmed(self, request_id: str) -> bool:
        """Whether the worker has moved the request's survivors."""
        return self._known(request_id).settled is not None

    def has_evicted(self, request_id: str) -> bool:
        """Whether the request's head blocks have gone back to the pool (and not come again)."""
        return self._known(request_id).released > 0

    def _known(self, request_id: str) -> SchedulerRequest:
        return self._requests.get(request_id, SchedulerRequest())

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
        if request.hit:
            have = self._shared_rows(request) * self._entries_per_row
        if need <= have and not request.hit:
            return 0  # nearly every request, every step
        blocks = sum(
            layers * (cdiv(need, ratio) - cdiv(have, ratio))
            for ratio, layers in self._layers_of_ratio.items()
        )
        most = blocks
        if apply_admission_cap and request.plan is not None:
            most = self.most_blocks(request_id, num_tokens)
        if request.hit and min(blocks, most) <= self.block_pool.get_num_free_blocks():
            # Shared blocks that nobody uses count as free, and will not any more.
            blocks += self.block_pool.idle_blocks(request.hit[: self._shared_rows(request)])
        # The most that it holds has what it shares among it.
        return min(blocks, most) if apply_admission_cap and request.plan is not None else blocks

    def most_blocks(self, request_id: str, num_tokens: int, late: int = 0) -> int:
        """Blocks that all layers hold at most until so many tokens of a request are computed.

        Args:
            late: see `RetentionPlan.most_blocks`.
        """
        plan = self.plan_of(request_id)
        if not (plan.inner or plan.every) or num_tokens < plan.prompt_len:
            return int((-(-num_tokens // self.block_sizes)).sum())
        return int(plan.most_blocks(num_tokens, self.block_sizes, late).sum())

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
        """Begin the request's tables with the rows that `cached_tokens` has found."""
        assert not any(new_computed_blocks) and num_external_computed_tokens == 0
        request = self._requests[request_id]
        assert num_local_computed_tokens == len(request.hit) * self._prefixes.tokens
        assert not request.num_blocks and not request.rows
        shared = self._shared_rows(request)
        if shared:
            request.rows, revived = self._prefixes.enter(request_id, request.hit[:shared])
            request.num_blocks = shared * self._entries_per_row
            self.held_blocks += self._prefixes.blocks * revived
        if copied := request.hit[shared:]:
            for block_hash in reversed(copied):
                self.block_pool.touch_row(block_hash)
            sources = self._prefixes.blocks_of(copied)
            new_blocks = self.allocate_new_blocks(
                request_id, num_local_computed_tokens, num_local_computed_tokens
            )
            self.block_copies += copies_of(sources, new_blocks)
        request.hit = []

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """The next blocks of every layer, `[layers][new blocks]`; usually none: an empty tuple."""
        request = self._requests.get(request_id)
        have = 0 if request is None else request.num_blocks
        if (need := cdiv(num_tokens, self.block_size)) <= have:
            return ()
        if request is None:  # without a plan
            request = self._requests[request_id] = SchedulerRequest()
        missing = -(-need // self._ratios) - -(-have // self._ratios)
        ends = missing.cumsum().tolist()
        pool_blocks = self.block_pool.get_new_blocks(ends[-1])
        request.num_blocks = need
        self.held_blocks += missing
        new_blocks = tuple(
            pool_blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)
        )
        for manager, blocks in zip(self.single_type_managers, new_blocks, strict=True):
            manager.req_to_blocks[request_id].extend(blocks)
            if manager.records_new_block_ids:
                manager.new_block_ids.extend(block.block_id for block in blocks)
        return new_blocks

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
        request = self._requests.get(request_id)
        if request is None or request.due is None or processed_computed_tokens < request.due:
            return
        settled, number = self._releasable(request_id, request, processed_computed_tokens)
        request.due = settled.next_eviction(processed_computed_tokens)
        skip = settled.skip_after(number)
        shared = self._prefixes.blocks * len(request.rows)
        left = self._leave_behind(request_id, request, settled)
        unused = left + self._leave_rows(request_id, request)
        own = np.zeros(self.num_layers, np.int64)
        for layer, (manager, head) in enumerate(
            zip(self.single_type_managers, (skip // self.block_sizes).tolist(), strict=True)
        ):
            own[layer] = manager.release_head(request_id, head)
        self.num_releases += 1
        self.held_blocks -= unused + own
        self.blocks_freed += shared + left + own
        self.skipped_tokens += skip - settled.skip_after(request.released)
        request.released = number

    def _releasable(
        self, request_id: str, request: SchedulerRequest, processed: int
    ) -> tuple[RetentionPlan, int]:
        """The settled plan and the eviction whose head may go now.

        Raises:
            RuntimeError: the worker was to evict by now and has not said so.
        """
        plan, settled, confirmed = request.plan, request.settled, request.confirmed
        assert plan is not None
        if settled is None and isinstance(plan, RetentionPlan):
            settled = plan  # perhaps it had nothing to give yet, and so nothing to report
        if settled is not None:
            number = settled.evictions_by(processed)
            skip = settled.skip_after(number)
            if number <= confirmed or (skip == settled.skip_after(confirmed)).all():
                return settled, number
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
        if (request := self._requests.get(request_id)) is None:
            return
        self._withdraw_rows(request_id, request)
        self._leave_behind(request_id, request, request.settled)
        in_rows = self._prefixes.blocks * len(request.rows)
        self.held_blocks -= -(-request.num_blocks // self._ratios) - in_rows
        self.held_blocks -= self._leave_rows(request_id, request)
        plan = request.settled or request.plan
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
        )

    def new_step_starts(self) -> None:
        """The managers keep nothing per step."""

    # Sizes ------------------------------------------------------------------------------------

    def blocks_of(self, plan: RetentionPlan) -> IntArray:
        """Blocks each layer holds of a prompt that was shortened by the plan, `[layers]`."""
        return plan.blocks_in(self.block_sizes)

    def whole_blocks(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Blocks of all layers together for so many tokens with nothing given back, any shape."""
        blocks = -(-tokens // self.block_size)
        total = self._layers_of_ratio[1] * blocks
        for ratio, layers in self._layers_of_ratio.items():
            if ratio > 1:
                total += layers * -(-blocks // ratio)
        return total

    @property
    def usable_blocks(self) -> int:
        """Blocks of the pool that are free or a request's: all but what somebody keeps back."""
        return self.block_pool.get_num_free_blocks() + int(self.held_blocks.sum())

    @property
    def full_block_size(self) -> int:
        """Tokens of a block of K and V."""
        size: int = self.single_type_managers[0].kv_cache_spec.full_block_size
        return size

    def full_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take where nothing is evicted and V is on the device."""
        return self.num_layers * cdiv(num_tokens, self.full_block_size)

    def blocks_held(self, request_id: str) -> list[int]:
        """Blocks the request holds, per layer, counted from its block lists."""
        return [manager.num_held(request_id) for manager in self.single_type_managers]


def _settled(request_id: str, plan: Plan, keep: tuple[int, ...] | None) -> RetentionPlan:
    try:
        return plan.settled(keep)
    except ValueError as error:
        raise RuntimeError(
            f"request {request_id}: the worker's report cannot be followed: {error}; scheduler and "
            "worker disagree about the KV policy; report this"
        ) from error
