# SPDX-License-Identifier: Apache-2.0
"""What eviction adds to vLLM's scheduler; vLLM's classes call it through their adapter."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.compat.scheduler_points import SchedulerPoints
from vllm_pyramid.compat.side_channel import (
    LEVELS,
    WITHOUT_LEVELS,
    StepReport,
    attach_block_copies,
    attach_messages,
)
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.policy.fit import Pool
from vllm_pyramid.policy.planning import levels_per_token
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.admission import Admission
from vllm_pyramid.scheduler.begun_answers import BegunAnswers
from vllm_pyramid.scheduler.chunks import Chunks
from vllm_pyramid.scheduler.failed_requests import FailedRequests
from vllm_pyramid.scheduler.host_tier import add_host_tier
from vllm_pyramid.scheduler.pressure import Pressure
from vllm_pyramid.scheduler.reports import EarlyReports, Reports
from vllm_pyramid.scheduler.request_planner import RequestPlanner
from vllm_pyramid.scheduler.resumed_turns import ResumedTurns
from vllm_pyramid.scheduler.turn_ways import TurnWays
from vllm_pyramid.step.failures import METHOD, Failure
from vllm_pyramid.step.hooks import SchedulerHooks

logger = init_logger(f"vllm.{__name__}")


class PolicyScheduler:
    """The policy's part of one scheduler. Its methods are called in this order:

        a request comes     add
        each step           begin_step, cached_tokens and chunks.next for requests, end_step
        its output          take_report, before vLLM gives blocks back
        a request ends      reports.of_request, ends, freed

    A request is planned when it arrives; a plan that depends on its scores is deferred until the
    worker has decided the lengths. The coordinator gives head blocks back once the worker has
    confirmed the compaction.

    Attributes:
        hooks: of the policy's methods, and of what the engine adds.
        ways: how turns of conversations continue.
        chunks: which prompts start, and sizes of chunks.
        begun: answers that begin with tokens which no step samples.
        failed: what went wrong. reports: what is reported. early: what of it before the end.
    """

    def __init__(
        self,
        engine: SchedulerPoints,
        coordinator: LockstepCoordinator,
        settings: ServedSettings,
        *,
        finds_prefixes: bool,
        hooks: Sequence[SchedulerHooks] = (),
    ) -> None:
        config, layer_blocks = engine.vllm_config, coordinator.layer_blocks
        self._engine, self.coordinator = engine, coordinator
        self.policy = settings.policy
        self.failed = FailedRequests()
        self.hooks = [
            *self.policy.scheduler_hooks(layer_blocks.num_tables),
            *add_host_tier(coordinator, config, settings, finds_prefixes=finds_prefixes),
            *hooks,
        ]
        self.begun = BegunAnswers()
        pool = Pool(
            layer_blocks.num_tables,
            layer_blocks.full_block_size,
            engine.kv_cache_config.num_blocks - 1,
            engine.max_model_len,
            int(
                coordinator.stock_groups.blocks_of(
                    engine.max_model_len, config.max_in_flight_tokens
                )
            ),
            layer_blocks.stages.sizes,
        )
        self.planner = RequestPlanner(
            settings,
            config.model_config,
            layer_blocks,
            pool,
            self.hooks,
            shares_prefixes=finds_prefixes,
        )
        admission = None
        if settings.forecasts:
            step_tokens = engine.max_num_scheduled_tokens
            admission = Admission(
                coordinator,
                max_model_len=engine.max_model_len,
                step_tokens=step_tokens,
                longest_chunk=engine.scheduler_config.long_prefill_token_threshold or step_tokens,
                lag=config.max_concurrent_batches - 1,
                ahead=engine.num_spec_tokens + engine.num_lookahead_tokens,
            )
        self.pressure = None
        if self.policy.schedule.waits_for_orders:
            self.pressure = Pressure(
                coordinator,
                [str(budget) for budget in self.policy.schedule.budgets_above],
                steps_ahead=config.max_concurrent_batches + 1,
                tokens_per_step=1 + engine.num_spec_tokens + engine.num_lookahead_tokens,
                watermark=engine.kv_cache_manager.watermark_blocks,
                levels_per_token=levels_per_token(
                    self.policy, engine.max_model_len, layer_blocks.num_tables, layer_blocks.largest
                ),
            )
            self.hooks.append(self.pressure)
        self.chunks = Chunks(engine, coordinator, settings, admission, self.pressure)
        self.ways = TurnWays(coordinator, self.planner, self.chunks.least_before)
        turns = ResumedTurns(
            coordinator, self.ways, self.chunks.least_before, finds_prefixes=finds_prefixes
        )
        self.reports = Reports(engine, coordinator, settings, self.hooks, self.failed, turns)
        self.reports.log_capacity()
        self.early = EarlyReports(coordinator, self.reports)

    def add(self, request: Request) -> None:
        """Plan what a request keeps. A wrong one ends with an error after its first step."""
        terms, error = self.planner.terms(request)
        if isinstance(error, Failure):
            self.fail(request.request_id, error.kind, error.reason)
        elif error is not None:
            logger.error("request %s: %s", request.request_id, error)
            self._engine.end_with_error(request.request_id, error)
        self.coordinator.plans.add(request.request_id, terms)
        self.ways.add(request, terms)
        self.early.add(request)

    def fail(self, request_id: str, kind: str, reason: str) -> None:
        """Count a request that has failed, and end it with an error."""
        self.failed.add(request_id, kind, reason)
        self._engine.end_with_error(request_id, f"KV policy: {reason}", code="kv_policy")

    # A step ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Prepare for the requests of a step."""
        self.chunks.begin_step()
        self.coordinator.stores.mark_scheduled()  # published between two steps: computed by now

    def cached_tokens(self, request: Request, most: int, *, shared: bool) -> int:
        """Find what a request without blocks need not compute, at most `most` tokens.

        The queries that score a prompt are computed in any case. `shared`: whether to look for what
        other requests have computed here.
        """
        plans, coordinator = self.coordinator.plans, self.coordinator
        self.chunks.loading.pop(request.request_id, None)  # it has lost what it held
        tokens = self.ways.find(request, most, shared=shared)
        found = plans.records[request.request_id].found
        if found is None or not found.store.loads_later:
            return tokens
        self.begun.add(request, found.store.answer(found.hit))
        if self.chunks.starts(request, plans.of(request.request_id), tokens):
            self.chunks.loading[request.request_id] = self.chunks.admitted = request
        else:  # vLLM asks for no chunk of it now
            coordinator.blocked_request = request.request_id
        return 0

    def end_step(self, output: SchedulerOutput) -> None:
        """Tell the workers what to do before the step that has just been scheduled."""
        coordinator, orders = self.coordinator, None
        if self.pressure is not None:
            orders = self.pressure.orders(
                self._engine.running, self.chunks.admitted, output.num_scheduled_tokens
            )
        coordinator.stores.mark_scheduled()
        attach_block_copies(output, coordinator.block_copies.take())
        # Last, when all requests have got the blocks that this step needs.
        evicting = self.chunks.evicting(output.num_scheduled_tokens)
        messages = coordinator.stores.take_messages(evicting)
        if orders:
            messages[LEVELS] = orders
        if self.pressure is not None and (names := self._without_levels(evicting, output)):
            messages[WITHOUT_LEVELS] = names
        attach_messages(output, messages)

    def _without_levels(self, ending: Sequence[Request], output: SchedulerOutput) -> list[str]:
        """Return the requests that get no levels; admission counts whole prompts of these."""
        assert self.pressure is not None
        running = self._engine.running if self.policy.schedule.levels_every else ()
        names = self.pressure.without_levels(ending, running, output.num_scheduled_tokens)
        if names and self.chunks.admission is not None:
            for request in ending:
                if request.request_id in names:
                    self.chunks.admission.table.put_whole(request.request_id)
        return names

    def take_report(self, report: StepReport) -> None:
        """Record the worker's evictions before blocks are given back; end what has failed there."""
        self.failed.dropped_traces += report.dropped_traces
        for hooks in self.hooks:
            if hooks.name in report.methods:
                with self.failed.dropping(f"the report of {hooks.name!r} on a step"):
                    is_alive = self._engine.requests.__contains__
                    counts = self._is_current if hooks.starts_anew else is_alive
                    hooks.on_step_report(report.methods[hooks.name], counts)
        for request_id, (kind, reason) in report.failures.items():
            if self._is_current(request_id):
                self.fail(request_id, kind, reason)
        plans = self.coordinator.plans
        for request_id, eviction in report.evictions.items():
            if request_id in report.failures or not self._is_current(request_id):
                continue
            plans.confirm(request_id, eviction)
            resolved = plans.confirmed(request_id)
            if resolved is None:
                continue
            try:
                for hooks in self.hooks:
                    hooks.on_eviction(request_id, plans.of(request_id), resolved)
            except Exception as error:
                self.fail(request_id, METHOD, f"`on_eviction`: {error!r}")
            if self.pressure is not None:
                self.pressure.blocks.release(self._engine.requests[request_id])
            elif self.chunks.admission is not None:
                number = plans.confirmed_number(request_id)
                self.chunks.admission.evicted(request_id, resolved, number)

    def _is_current(self, request_id: str) -> bool:
        """Return whether a step's report counts: not if the request has finished, nor if it was
        preempted while the step ran, since it then evicts again.
        """
        request = self._engine.requests.get(request_id)
        return request is not None and request.num_stale_output_tokens == 0

    # Ends -----------------------------------------------------------------------------------------

    def ends(self, request: Request) -> None:
        """Save what a request leaves; one that has failed may hold something else than planned."""
        if request.status != RequestStatus.FINISHED_ERROR:
            self.coordinator.save(request)
            self.ways.ends(request)

    def freed(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.early.forget(request.request_id)
        self.begun.forget(request.request_id)
        self.ways.forget(request.request_id)
        self.chunks.loading.pop(request.request_id, None)
        self.coordinator.plans.forget(request.request_id)
        if self.chunks.admission is not None:
            self.chunks.admission.ended(request)

    def verified(self, accepted: int) -> None:
        """Learn how many drafts of a request were accepted in a step."""
        if self.chunks.admission is not None:
            self.chunks.admission.pace.add(1 + accepted)

    def close(self) -> None:
        """End the hooks."""
        for hooks in self.hooks:
            hooks.close()
