# SPDX-License-Identifier: Apache-2.0
"""What a scheduler reports: the pool's capacity, each request's eviction, and the statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_pyramid.compat.scheduler_points import SchedulerPoints
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.policy.kept_spans import flat
from vllm_pyramid.policy.planning import peak_blocks_up_to
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.failed_requests import FailedRequests
from vllm_pyramid.scheduler.page_data import page_data
from vllm_pyramid.scheduler.resumed_turns import ResumedTurns
from vllm_pyramid.step.hooks import SchedulerHooks

logger = init_logger(f"vllm.{__name__}")

# Counters that send the statistics; tokens move with every step, which would be too often.
_CHANGES = (
    *("evictions", "blocks_held", "failed_requests", "dropped_traces", "dropped_reports"),
    *("host_cache", "turns", "handed"),
)
# Of one request's report: 1 KiB for each of a model's layers, and as many again.
MAX_REPORT_BYTES = 1 << 18


class Reports:
    """The reports of one scheduler; what the hooks report goes out with the rest."""

    def __init__(
        self,
        engine: SchedulerPoints,
        coordinator: LockstepCoordinator,
        settings: ServedSettings,
        hooks: Sequence[SchedulerHooks],
        failed: FailedRequests,
        turns: ResumedTurns,
    ) -> None:
        self._engine, self._coordinator, self._policy = engine, coordinator, settings.policy
        self._turns = turns
        self._shows_cached = settings.reports_cached
        self._hooks, self._failed = hooks, failed
        self._sent: dict[str, Any] | None = None

    @cached_property
    def _layers(self) -> dict[str, Any]:
        """Return which of the model's layers evict, unless all do."""
        of_model = list(range(len(self._coordinator.layers)))
        if self._coordinator.layers == of_model and self._coordinator.stock_groups.are_drafts:
            return {}
        return {"layers": self._coordinator.layers}

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """Return what the statistics say of the server, which never changes."""
        stages = self._coordinator.layer_blocks.stages
        return {
            **self._layers,
            "policy": [self._policy.name, str(self._policy.budget)],
            "pool_blocks": (self._engine.kv_cache_config.num_blocks - 1) * len(stages),
        }

    def log_capacity(self) -> None:
        """Log how many prompts of the model's length the pool holds."""
        length = self._engine.max_model_len
        coordinator, layer_blocks = self._coordinator, self._coordinator.layer_blocks
        num_layers, stages = layer_blocks.num_tables, layer_blocks.stages
        stock_blocks = 0
        if coordinator.stock_groups:
            stock_blocks = int(coordinator.stock_groups.blocks_of(length, 1))
            logger.info(
                "kv-policy %s: layers %s evict; %s with a cache (%d) hold as many blocks as in "
                "stock vLLM: %d for a prompt of %d tokens",
                self._policy.name,
                ", ".join(map(str, coordinator.layers)),
                "a draft model's" if coordinator.stock_groups.are_drafts else "the others",
                len(coordinator.stock_groups),
                stock_blocks,
                length,
            )
        plan = self._policy.plan(length, num_layers, layer_blocks.largest)
        if not plan.exact:
            logger.info(
                "kv-policy %s: scores decide how much each prompt keeps, at most %d of %d tokens a "
                "layer",
                self._policy.name,
                plan.budget_tokens,
                length,
            )
            return
        plan = plan.estimate()  # another shape rounds to blocks a little differently
        total = self._engine.kv_cache_config.num_blocks - 1
        full, kept = layer_blocks.full(length), plan.end.blocks_in(layer_blocks.block_sizes)
        whole = np.full_like(kept, full // num_layers)
        logger.info(
            "kv-policy %s: a prompt of %d tokens keeps %d of %d blocks over %d %s; the pool of "
            "%d blocks%s holds %.1f such prompts whole and %.1f %s",
            self._policy.name,
            length,
            kept.sum(),
            full,
            num_layers,
            coordinator.layout.owners,
            total,
            f" of each of {len(stages)} pipeline stages" if len(stages) > 1 else "",
            total / (stages.sums(whole).max() + stock_blocks),
            total / (stages.sums(kept).max() + stock_blocks),
            "evicted" if plan.evicts else "with this policy",
        )
        if plan.inner:
            peak = peak_blocks_up_to(
                self._policy, length, num_layers, layer_blocks.full_block_size, stages.sizes
            )
            logger.info(
                "kv-policy %s: evicts inside prompts, every %d tokens from token %d on; a prompt "
                "of up to %d tokens holds at most %d blocks%s",
                self._policy.name,
                self._policy.chunk.tokens,
                plan.exact_tokens,
                length,
                stages.sums(peak).max(),
                " of a stage" if len(stages) > 1 else "",
            )

    def of_request(self, request: Request, *, ended: bool = True) -> dict[str, Any]:
        """Return what the request kept; if that cannot be sent, the reason.

        The engine core's process ends when it cannot serialise a response. What is counted until a
        request's end is left out before it has `ended`.
        """
        try:
            report = self._report_of(request, ended=ended)
            size = len(msgspec.msgpack.encode(report))
            if size > MAX_REPORT_BYTES:
                raise ValueError(f"it has {size} bytes, more than {MAX_REPORT_BYTES}")
        except Exception as error:
            return self._failed.drop_report(request.request_id, error)
        return report

    def _report_of(self, request: Request, *, ended: bool) -> dict[str, Any]:
        """Return what the request kept.

        What the cache held for it tells of other requests. That is reported where vLLM would report
        it (`ServedSettings.reports_cached`), and to a request with a `cache_salt`, which finds only
        what came with the same salt.
        """
        shows_cached = self._shows_cached or bool(request.cache_salt)
        plans, sessions = self._coordinator.plans, self._coordinator.sessions
        layer_blocks = self._coordinator.layer_blocks
        served, plan = plans.records[request.request_id].terms.served, plans.of(request.request_id)
        assert served is not None, "the planner's terms have it"
        prompt_len = request.num_prompt_tokens
        whole = -(-prompt_len // layer_blocks.block_sizes)
        report: dict[str, Any] = {
            "kv_policy": served.policy.name,
            "kv_budget": plan.budget_tokens,
            "prompt_tokens": prompt_len,
            **self._layers,
            **self._coordinator.layout.report(),
            "kept_tokens": [prompt_len] * layer_blocks.num_tables,
            "evicted_tokens": 0,
            "blocks_before": layer_blocks.full(prompt_len),
            "blocks_after": int(whole.sum()),
        }
        if self._policy.inner_policy is not None or served.turns is not None:
            report["inner_evictions"] = len(plan.inner)
        if served.turns is not None:
            report["kv_turns"] = [*served.turns, prompt_len]
            report["kv_turn_mode"] = self._turns.ways.mode(request.request_id, served)
            reason, said = self._turns.of(request, served)
            self._turns.counts[reason] += ended
            if served.session is not None:
                report["kv_session"] = served.session
            if shows_cached:
                report["resumed_tokens"] = sessions.resumed_tokens(request.request_id)
                report["resumed"] = said
            elif served.why_exact:
                report["resumed"] = {"because": served.why_exact}
        resolved = plans.confirmed(request.request_id)
        if resolved is not None:
            number = plans.confirmed_number(request.request_id)
            if request.num_computed_tokens >= prompt_len:
                number = max(number, resolved.end_number)  # which may have had nothing to give
            point = resolved.end
            if resolved.every or number != resolved.end_number or point.computed != prompt_len:
                # Everything below describes the latest eviction.
                point = resolved.after(number)
                report["kv_budget"] = point.budget_tokens
                report["computed_tokens"] = point.computed
                report["blocks_before"] = layer_blocks.full(point.computed)
            report["kept_tokens"] = point.held.tolist()
            report["evicted_tokens"] = int(point.skip.sum())
            report["blocks_after"] = int(point.blocks_in(layer_blocks.block_sizes).sum())
            if plan.is_deferred:
                report["kv_budget"] = point.budget_tokens
                report["solved_tokens"] = point.keep.tolist()
        if served.share_floor is not None:
            report["kv_min_tokens"] = served.share_floor
        if served.keep:
            report["kv_keep"] = flat(served.keep)
            report["protected_tokens"] = served.protected_tokens(prompt_len)
        if served.leaves_out_template:
            report["kv_template"] = "left out: it exceeds --kv-max-request-budget"
        for hooks in self._hooks if ended else ():
            own = hooks.on_request_finished(request.request_id)
            if not shows_cached:
                own = {key: own[key] for key in own.keys() - hooks.tells_of_others}
            report |= own
        return report

    def changes(self) -> dict[str, Any] | None:
        """Return the counters to send, if they have changed; None if not.

        Each message reaches one of possibly several front ends, so it also has the counters of the
        message before.
        """
        now, before = self.policy_stats(), self._sent
        if before is not None and all(now.get(name) == before.get(name) for name in _CHANGES):
            return None
        self._sent = now
        return {"now": now, "before": before}

    def page_data(self) -> dict[str, Any]:
        """Return what the live page shows."""
        return page_data(
            self._coordinator, self._engine.running, len(self._engine.waiting), self.policy_stats()
        )

    def policy_stats(self) -> dict[str, Any]:
        """Return counters since the start and what is held now, per layer.

        Blocks are summed over a layer's tables, and tokens are their mean.
        """
        computed = sum(request.num_computed_tokens for request in self._engine.running)
        counters, stock_groups = self._coordinator.counters, self._coordinator.stock_groups
        layout = self._coordinator.layout
        totals: dict[str, Any] = {}
        for hooks in self._hooks:
            with self._failed.dropping(f"the counters of {hooks.name!r}"):
                totals |= hooks.totals()
        return {
            **totals,
            **self._failed.totals(),
            **self._constants,
            **({"turns": dict(self._turns.counts)} if self._turns.counts else {}),
            "evictions": counters.num_evictions,
            "tokens_evicted": layout.means(counters.tokens_evicted),
            "blocks_freed": layout.sums(counters.blocks_freed),
            "blocks_held": layout.sums(counters.held_blocks),
            "tokens_held": layout.means(computed - counters.skipped_tokens),
            **({"other_blocks_held": stock_groups.held_blocks} if stock_groups else {}),
        }


class EarlyReports:
    """Reports on requests with stop strings before they end.

    The front end finds a stop string and answers at once; the scheduler only learns that the
    request was aborted. So the report travels with the first token, and with each later eviction.

    `waiting` has the requests with stop strings, each with the number of the latest eviction that
    was reported; None before the first report.
    """

    def __init__(self, coordinator: LockstepCoordinator, reports: Reports) -> None:
        self._plans, self._reports = coordinator.plans, reports
        self.waiting: dict[str, int | None] = {}

    def add(self, request: Request) -> None:
        """Report on a new request early, if it has stop strings."""
        params = request.sampling_params
        if params is not None and params.stop:
            self.waiting[request.request_id] = None

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.waiting.pop(request_id, None)

    def attach(self, requests: Mapping[str, Request], outputs: Mapping[int, Any]) -> None:
        """Attach reports to the outputs, by front end, of requests that go on."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                name = output.request_id
                if name not in self.waiting or output.finish_reason is not None:
                    continue
                number = self._plans.confirmed_number(name)
                if number != self.waiting[name]:
                    self.waiting[name] = number
                    request = requests[name]
                    output.kv_transfer_params = self._reports.of_request(request, ended=False)
