# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with a KV budget per layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.compat import page_server
from vllm_pyramid.compat.block_pool import lockstep_coordinator
from vllm_pyramid.compat.side_channel import attach_block_copies, attach_messages, read_report
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.new_blocks import NoBlocks, kv_cache_blocks
from vllm_pyramid.plan import Plan
from vllm_pyramid.policy.fit import Pool
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.admission import Admission
from vllm_pyramid.scheduler.failed_requests import FailedRequests
from vllm_pyramid.scheduler.host_tier import add_host_tier
from vllm_pyramid.scheduler.reports import Reports
from vllm_pyramid.scheduler.request_planner import RequestPlanner
from vllm_pyramid.step.failures import METHOD, Failure

logger = init_logger(f"vllm.{__name__}")


class PyramidSchedulerMixin(Reports):
    """What eviction adds to vLLM's scheduler.

    - The scheduler plans what every layer keeps when a request arrives. If the lengths depend on
      the request's scores, the plan is deferred until the worker has solved them.
    - A chunk never crosses an eviction, inside the prompt, at its end or later. So a preempted
      request that comes back with generated tokens evicts where it did the first time. The last
      chunk of a prompt is never shorter than the observation window.
    - The coordinator gives head blocks back once the worker has confirmed the compaction.
    - A request shares of a cached prefix what it may share and gets copies of the rest, except the
      queries that score it. The worker first copies what an eviction overwrites.
    - A prompt starts only if it will not be preempted before its prefill was worth it
      (`Admission`).
    - Reports go out with the request and with the statistics (`Reports`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with lockstep_coordinator(LockstepCoordinator):
            super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        assert isinstance(coordinator, LockstepCoordinator)
        self.coordinator = coordinator
        manager: Any = self.kv_cache_manager
        empty = NoBlocks(manager.empty_kv_cache_blocks.blocks)
        manager.empty_kv_cache_blocks = empty
        manager.create_kv_cache_blocks = partial(kv_cache_blocks, none=empty)
        # vLLM's would look for the hashes of blocks, layer by layer; these blocks have none.
        manager.estimate_cached_tokens = lambda request: coordinator.prefixes.findable_tokens(
            request.request_id
        )
        # Not empty to vLLM, so it lets the coordinator allocate what `cached_prefix` has found.
        self._hit = KVCacheBlocks(tuple(() for _ in coordinator.single_type_managers))
        settings = ServedSettings.of(self.vllm_config)
        assert settings is not None, "this scheduler is only chosen when a policy was asked for"
        if manager.enable_caching and not coordinator.share_prefixes():
            reason = (
                "layers of this model keep a state, or they or those of a draft model have larger "
                "blocks than those that evict"
            )
            if settings.asks_prefix_caching:
                raise ValueError(
                    f"a KV policy does not work with --enable-prefix-caching and this model yet: "
                    f"{reason}; leave the flag out"
                )
            manager.enable_caching = False
            logger.info("kv-policy %s: prefix caching is off: %s", settings.policy.name, reason)
        self.kv_policy = settings.policy
        self.reports_cached = settings.reports_cached
        self._min_last_chunk = settings.min_last_chunk
        self._min_inner_chunk = settings.min_inner_chunk
        inside = self.kv_policy.inner_policy
        # Otherwise the pool has room for whole sequences, so no request waits for its own head.
        self._pool_may_be_smaller = inside is not None or self.kv_policy.schedule.every > 0
        self.failed = FailedRequests()
        self.hooks = [
            *self.kv_policy.scheduler_hooks(coordinator.layer_blocks.num_layers),
            *add_host_tier(
                coordinator, self.vllm_config, settings, finds_prefixes=manager.enable_caching
            ),
        ]
        in_flight = self.vllm_config.max_in_flight_tokens
        self._pool = Pool(
            coordinator.layer_blocks.num_layers,
            coordinator.layer_blocks.full_block_size,
            self.kv_cache_config.num_blocks - 1,
            self.max_model_len,
            int(coordinator.stock_groups.blocks_of(self.max_model_len, in_flight)),
            coordinator.layer_blocks.stages.sizes,
        )
        self._planner = RequestPlanner(
            settings,
            self.vllm_config.model_config,
            coordinator.layer_blocks,
            self._pool,
            self.hooks,
            shares_prefixes=manager.enable_caching,
        )
        self._admission = None
        if settings.forecasts:
            self._admission = Admission(
                coordinator,
                max_model_len=self.max_model_len,
                step_tokens=self.max_num_scheduled_tokens,
                longest_chunk=self.scheduler_config.long_prefill_token_threshold
                or self.max_num_scheduled_tokens,
                lag=self.vllm_config.max_concurrent_batches - 1,
                ahead=self.num_spec_tokens + self.num_lookahead_tokens,
            )
        # Requests that may come to their first eviction in the step being scheduled.
        self._evicting: list[Request] = []
        if settings.page:
            page_server.install_engine()
        self.log_capacity(self._pool.block_size)

    def add_request(self, request: Request) -> None:
        """Plan what the request keeps, then queue it.

        Raises:
            AssertionError: vLLM's, for an id that another request has.
        """
        if request.request_id in self.requests:
            super().add_request(request)  # before that one's plan would be lost
            return
        terms, error = self._planner.terms(request)
        if isinstance(error, Failure):
            self.fail(request.request_id, error.kind, error.reason)
        elif error is not None:
            logger.error("request %s: %s", request.request_id, error)
            self.end_with_error(request.request_id, error)
        self.coordinator.plans.add(request.request_id, terms)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and tell the workers which blocks to copy before it."""
        coordinator = self.coordinator
        self._evicting = []
        coordinator.stores.mark_scheduled()  # what was published between two steps is computed
        output = super().schedule(*args, **kwargs)
        coordinator.stores.mark_scheduled()
        attach_block_copies(output, coordinator.block_copies.take())
        # Last, when all requests have got the blocks that this step needs.
        scheduled = output.num_scheduled_tokens
        evicting = [request for request in self._evicting if request.request_id in scheduled]
        attach_messages(output, coordinator.stores.take_messages(evicting))
        return output

    def cached_prefix(self, request: Request, most: int) -> tuple[KVCacheBlocks, int]:
        """Find what others have computed; the queries that score a prompt are computed anyway."""
        empty = self.kv_cache_manager.empty_kv_cache_blocks
        if not self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return empty, 0
        plans = self.coordinator.plans
        least = partial(self._least_before, plans.of(request.request_id))
        record = plans.records[request.request_id]
        tokens = self.coordinator.stores.find(request, record, most, least)
        return (self._hit if tokens else empty), tokens

    def _least_before(self, plan: Plan, point: int) -> int:
        """Return the fewest tokens of a chunk that ends at an eviction of the prompt."""
        return self._min_inner_chunk if point < plan.prompt_len else self._min_last_chunk

    def next_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Limit vLLM's chunk so that it ends at the next eviction.

        |<- computed ->|<- chunk ->|<- at least the window ->|<- generated before preemption
        0                                              prompt_len   prompt_len + every   ...

        Each piece of a plan is computed in one step: the request waits until a step has room for
        it. vLLM also asks for a request that does not run yet. If that one is not to start now, it
        must stay first in the queue, and vLLM must release what it has pinned for it. vLLM does
        both where blocks are missing, so the coordinator reports that they are. (Returning 0 tokens
        would do in vLLM 0.32; in 0.33 the requests behind would overtake it.)
        """
        if not tokens:
            return 0  # vLLM has no room for its images
        waits = request.status != RequestStatus.RUNNING
        if not (waits or self._pool_may_be_smaller) and computed >= request.num_prompt_tokens:
            return self.stock_chunk(request, computed, tokens)  # nearly every request, every step
        plan = self.coordinator.plans.of(request.request_id)
        if (
            not waits
            or self._admission is None
            or self._admission.admits(request, plan, computed, self.running)
        ):
            chunk = self._chunk(request, plan, computed, tokens)
            terms = self.coordinator.plans.records[request.request_id].terms
            chunk = terms.units.chunk(computed, chunk)
            if (
                self._pool_may_be_smaller
                and not waits
                and self.coordinator.waits_for_blocks(request, computed + chunk)
            ):
                return 0
            if chunk or not waits:
                return chunk
        self.coordinator.blocked_request = request.request_id
        return tokens

    def _chunk(self, request: Request, plan: Plan, computed: int, tokens: int) -> int:
        """Return the tokens of the next chunk, at most `tokens`; 0 if the step lacks room."""
        tokens = self.stock_chunk(request, computed, tokens)
        if computed >= plan.prompt_len and not plan.every:
            return tokens  # all has been evicted
        if request.status != RequestStatus.RUNNING and computed + tokens > request.num_tokens:
            return tokens  # its last token, to which vLLM has added places for drafts
        stop = plan.next_eviction(computed) if plan.evicts else None
        if stop is None:
            left = plan.prompt_len - computed
            splits = self.kv_policy.splits_at_prompt_end and left > 0
            return min(tokens, left) if splits else tokens
        if piece := plan.piece_at(computed):
            return piece.tokens if tokens >= piece.tokens else 0
        tokens = min(tokens, stop - computed)
        left = stop - computed - tokens
        if left == 0 and stop == plan.exact_tokens:
            self._evicting.append(request)
        least = self._least_before(plan, stop)
        if computed < plan.prompt_len and 0 < left < least:
            tokens -= least - left
        return max(tokens, 0)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Record the worker's evictions before blocks are given back; end what has failed there."""
        report = read_report(model_runner_output)
        self.failed.dropped_traces += report.dropped_traces
        for hooks in self.hooks:
            if hooks.name in report.methods:
                with self.failed.dropping(f"the report of {hooks.name!r} on a step"):
                    hooks.on_step_report(report.methods[hooks.name], self.requests.__contains__)
        for request_id, (kind, reason) in report.failures.items():
            if self._is_current(request_id):
                self.fail(request_id, kind, reason)
        for request_id, eviction in report.evictions.items():
            if request_id in report.failures or not self._is_current(request_id):
                continue
            self.coordinator.plans.confirm(request_id, eviction)
            resolved = self.coordinator.plans.confirmed(request_id)
            if resolved is None:
                continue
            try:
                for hooks in self.hooks:
                    hooks.on_eviction(request_id, self.coordinator.plans.of(request_id), resolved)
            except Exception as error:
                self.fail(request_id, METHOD, f"`on_eviction`: {error!r}")
            if self._admission is not None:
                number = self.coordinator.plans.confirmed_number(request_id)
                self._admission.evicted(request_id, resolved, number)
        return super().update_from_output(scheduler_output, model_runner_output)

    def shutdown(self) -> None:
        """End as vLLM does, and the hooks with it."""
        super().shutdown()
        for hooks in self.hooks:
            hooks.close()

    def _is_current(self, request_id: str) -> bool:
        """Return whether a step's report counts: not if the request has finished, nor if it was
        preempted while the step ran, since it then evicts again.
        """
        request = self.requests.get(request_id)
        return request is not None and request.num_stale_output_tokens == 0

    def verified(self, accepted: int) -> None:
        """Learn how many tokens a request with drafts gets in a step."""
        if self._admission is not None:
            self._admission.pace.add(1 + accepted)

    def ends(self, request: Request) -> None:
        """Save a request's session; one that has failed may hold something else than planned."""
        if request.status != RequestStatus.FINISHED_ERROR:
            self.coordinator.save(request)

    def freed(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.coordinator.plans.forget(request.request_id)
        if self._admission is not None:
            self._admission.ended(request)


class PyramidScheduler(PyramidSchedulerMixin, Scheduler):
    """Over vLLM's synchronous scheduler."""


class PyramidAsyncScheduler(PyramidSchedulerMixin, AsyncScheduler):
    """Over vLLM's asynchronous scheduler (the default on CUDA)."""
