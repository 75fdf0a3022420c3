# SPDX-License-Identifier: Apache-2.0
"""Adapters: vLLM's schedulers, which call a `PolicyScheduler`."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_pyramid.compat import new_weights, page_server
from vllm_pyramid.compat.block_pool import lockstep_coordinator
from vllm_pyramid.compat.scheduler_points import SchedulerPoints, connector_hooks
from vllm_pyramid.compat.side_channel import attach_policy_stats, read_report
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.new_blocks import NoBlocks, kv_cache_blocks
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.policy_scheduler import PolicyScheduler

logger = init_logger(f"vllm.{__name__}")


class SchedulerAdapter(SchedulerPoints):
    """Mixed into vLLM's schedulers; `pyramid` is what eviction adds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with lockstep_coordinator(LockstepCoordinator):
            super().__init__(*args, **kwargs)
        manager: Any = self.kv_cache_manager
        coordinator = manager.coordinator
        assert isinstance(coordinator, LockstepCoordinator)
        self.coordinator = coordinator
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
        manager.enable_caching = _finds_prefixes(manager.enable_caching, coordinator, settings)
        self.pyramid = PolicyScheduler(
            self,
            coordinator,
            settings,
            finds_prefixes=manager.enable_caching,
            hooks=connector_hooks(self.connector),
        )
        # Called for every request in every step, so without a function in between.
        self.next_chunk = self.pyramid.chunks.next  # type: ignore[method-assign]
        new_weights.install()
        if settings.page:
            page_server.install_engine()

    def add_request(self, request: Request) -> None:
        """Plan what the request keeps, then queue it."""
        if request.request_id not in self.requests:  # that one's plan would be lost
            self.pyramid.add(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.pyramid.begin_step()
        output = super().schedule(*args, **kwargs)
        self.pyramid.end_step(output)
        if self.pyramid.begun:
            self.pyramid.begun.tell(output, self.requests)
        return output

    def cached_prefix(self, request: Request, most: int) -> tuple[KVCacheBlocks, int]:
        shared = self.kv_cache_manager.prefix_cache_lookup_enabled(request)
        tokens = self.pyramid.cached_tokens(request, most, shared=shared)
        return (self._hit if tokens else self.kv_cache_manager.empty_kv_cache_blocks), tokens

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self.pyramid.take_report(read_report(model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.pyramid.begun:
            self.pyramid.begun.put_in_front(outputs)
        if self.pyramid.early.waiting:
            self.pyramid.early.attach(self.requests, outputs)
        return outputs

    def verified(self, accepted: int) -> None:
        self.pyramid.verified(accepted)

    def report_of(self, request: Request) -> dict[str, Any]:
        return self.pyramid.reports.of_request(request)

    def ends(self, request: Request) -> None:
        self.pyramid.ends(request)

    def freed(self, request: Request) -> None:
        self.pyramid.freed(request)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Add the per-layer counters to vLLM's statistics, if they have changed."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and (own := self.pyramid.reports.changes()) is not None:
            attach_policy_stats(stats, own)
        return stats

    def page_data(self) -> dict[str, Any]:
        """Return what the live page shows; asked for by a front end, never sent by itself."""
        return self.pyramid.reports.page_data()

    def shutdown(self) -> None:
        """End as vLLM does, and the policy's hooks with it."""
        super().shutdown()
        self.pyramid.close()


def _finds_prefixes(
    asked: bool, coordinator: LockstepCoordinator, settings: ServedSettings
) -> bool:
    """Return whether requests find prefixes, and let them be found.

    Raises:
        ValueError: the model cannot, and the flag asks for it.
    """
    events = coordinator.block_pool.enable_kv_cache_events
    if asked and coordinator.share_prefixes():
        return True
    if not asked and not events:
        return False
    reason = (
        "layers of this model keep a state, or they or those of a draft model have larger blocks "
        "than those that evict"
    )
    if settings.asks_prefix_caching or events:
        flag = "--kv-events-config" if events else "--enable-prefix-caching"
        raise ValueError(
            f"a KV policy does not work with {flag} and this model yet: {reason}; "
            "leave the flag out"
        )
    logger.info("kv-policy %s: prefix caching is off: %s", settings.policy.name, reason)
    return False


class PyramidScheduler(SchedulerAdapter, Scheduler):
    """Over vLLM's synchronous scheduler."""


class PyramidAsyncScheduler(SchedulerAdapter, AsyncScheduler):
    """Over vLLM's asynchronous scheduler (the default on CUDA)."""
