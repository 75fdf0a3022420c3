# SPDX-License-Identifier: Apache-2.0
"""What a worker does for its policy; vLLM's model runners call it through their adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_pyramid.attention.shifted_tables import Slots
from vllm_pyramid.compat.cache_specs import set_scales_of_tokens
from vllm_pyramid.compat.cpu_resources import available_host_memory
from vllm_pyramid.compat.runner import send_report
from vllm_pyramid.compat.side_channel import (
    HOST_CACHE,
    LEVELS,
    PREFIXES,
    SESSIONS,
    TIER,
    WITHOUT_LEVELS,
    HostCopies,
    StepReport,
    read_messages,
)
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.step.hooks import MethodHooks, WorkerContext
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.worker.answer_levels import AnswerLevels
from vllm_pyramid.worker.block_copies import copy_blocks
from vllm_pyramid.worker.copy_stream import copies_of, host_memory_of
from vllm_pyramid.worker.eviction_tracker import EvictionTracker, IntArray
from vllm_pyramid.worker.host_pool import HostPool
from vllm_pyramid.worker.late_evictions import LateEvictions
from vllm_pyramid.worker.layer_binding import LayerBinding
from vllm_pyramid.worker.memory import WorkerMemory
from vllm_pyramid.worker.pipeline_sync import PipelineSync
from vllm_pyramid.worker.step_tables import FrontMove, RunnerTables, StepTables, front_moves
from vllm_pyramid.worker.warm_up import compile_kernels
from vllm_pyramid.worker.worker_layers import WorkerLayers


def captures_decode_steps(config: VllmConfig) -> bool:
    """Return whether vLLM captures graphs of whole decode steps."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.decode_mode() == CUDAGraphMode.FULL


class WorkerRuntime:
    """The policy's part of one worker, made when the model has been loaded.

    Its methods are called in this order:

        start-up    memory, prepare_cache, bind (both twice if vLLM measures graphs first),
                    compile_kernels, start_trace
        each step   take_messages, add_requests, begin_step or idle_step,
                    (each layer attends and evicts, by its context), end_step

    Attributes:
        pipeline: this worker's place in the pipeline.
        layers: the worker's layers. tracker: the requests, and the current step.
        tables: the block tables that attention reads. binding: the contexts of the layers.
        memory: what the policy needs in addition to the cache.

    Args:
        config: vLLM's. settings: the served policy's.
        device: of the cache and the attention. get_model: returns the loaded model.
        stock_specs: vLLM's spec of each of this worker's layers.
        runner_tables: the block tables of vLLM's model runner.
        ranks: this worker's tensor-parallel group.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: ServedSettings,
        device: torch.device,
        get_model: Callable[[], torch.nn.Module],
        stock_specs: Mapping[str, KVCacheSpec],
        runner_tables: RunnerTables,
        pipeline: PipelineSync,
        ranks: Ranks,
    ) -> None:
        self.pipeline = pipeline
        self._config, self._settings, self._ranks = config, settings, ranks
        self._device = device
        self._trace: TraceWriter | None = None
        policy = settings.policy
        self.layers = WorkerLayers.collect(config, get_model(), policy, stock_specs, pipeline)
        self.tracker = tracker = EvictionTracker(
            policy,
            num_layers=self.layers.num_tables,
            block_size=self.layers.block_size,
            max_num_reqs=config.scheduler_config.max_num_seqs + 1,
            turn_mode=settings.turn_mode,
            why_no_turns=settings.why_no_turns,
        )
        self.tables = StepTables(runner_tables, self.layers, device)
        context = WorkerContext(
            config,
            device,
            list(self.layers.evicting.values()),
            tracker.block_size,
            ranks,
            model=get_model,
            step=lambda: tracker.step,
            swap_space_bytes=settings.swap_space_bytes,
            allow_device_sync=gpu_sync_allowed,
            host_memory=host_memory_of(device),
            copies=copies_of(device),
            table=self.tables.of_layer,
            tables_per_layer=self.layers.tables_per_layer,
            whole_graphs=partial(captures_decode_steps, config),
            at_step_end=lambda: self.binding.at_step_end,
        )
        hooks = policy.worker_hooks(context)
        self.late: LateEvictions | None = None
        if policy.schedule.waits_for_orders:
            answers = policy.schedule.levels_every
            self.late = (AnswerLevels if answers else LateEvictions)(policy, context)
            hooks.append(self.late)
        tracker.hooks = MethodHooks(hooks)
        tracker.failures.has_peers = ranks.size > 1 or pipeline.count > 1
        tracker.failures.reports_evictions = not pipeline.is_last
        self.binding = LayerBinding(
            *(config, get_model, self.layers, tracker, self.tables, ranks),
            traces=settings.trace is not None,
        )
        self.memory = WorkerMemory(
            config, settings, device, self.layers, tracker.hooks, runner_tables
        )
        self.host_pool: HostPool | None = None
        self._front_moves: list[FrontMove] = []  # of the latest step

    # Start-up -------------------------------------------------------------------------------------

    def prepare_cache(self, num_blocks: int) -> None:
        """Prepare for vLLM's allocation of a cache of `num_blocks` blocks.

        vLLM may allocate twice, first to measure what CUDA graphs need: what the first allocation
        bound is released before the second.
        """
        self.binding.release()
        if self.late is not None:
            self.late.release()
        for hooks in self.tracker.hooks.cache:
            hooks.allocate(num_blocks)
        if self._settings.host_cache_bytes is not None and self.host_pool is None:
            self.memory.check_host(available_host_memory())
            specs = list(self.layers.evicting.values())
            self.host_pool = HostPool(
                self._settings.host_cache_bytes,
                specs,
                host_memory_of(self._device),
                self.pipeline.stage * self._ranks.size + self._ranks.rank,
                self._settings.policy.extra_bytes(specs[0]),
                has_files=self._settings.host_cache_dir is not None,
                stream=copies_of(self._device),
            )

    def bind(self, attn_groups: Sequence[Sequence[Any]]) -> None:
        """Bind the layers, whose caches vLLM has allocated; errors as of `LayerBinding.bind`."""
        set_scales_of_tokens(self._config.compilation_config.static_forward_context.values())
        self.binding.bind(attn_groups, self._trace)

    def bind_host_pool(self, kv_caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """Bind the host cache, if there is one; arguments and errors as of `HostPool.bind`."""
        if self.host_pool is None:
            return
        found = [hooks.block_extras() for hooks in self.tracker.hooks.cache]
        self.host_pool.bind(kv_caches, num_blocks, [one for one in found if one is not None])

    def compile_kernels(self) -> None:
        """Compile every variant of the kernels of evictions, so that no request waits for one."""
        model, traces = self._config.model_config, self._settings.trace is not None
        layers = self.binding.layers()
        assert isinstance(model.dtype, torch.dtype), "vLLM replaces names such as 'auto'"
        compile_kernels(layers, model.max_model_len, model.dtype, traces=traces)

    def start_trace(self) -> None:
        """Write traces from now on. The worker calls this when its warm-up requests are over."""
        folder = self._settings.trace
        if folder is None:
            return
        per_layer = self.layers.tables_per_layer
        self._trace = TraceWriter(
            folder,
            [spec.num_kv_heads for spec in self.layers.evicting.values() for _ in range(per_layer)],
            self._ranks.rank,
            self._ranks.size,
            [layer for layer in self.layers.model_layers for _ in range(per_layer)],
            first_layer=self.layers.stage.start * per_layer,
            stage=self.pipeline.stage if self.pipeline.count > 1 else None,
            tables_per_layer=per_layer,
        )
        self.binding.set_trace(self._trace)
        for hooks in self.tracker.hooks:
            hooks.trace = self._trace

    # A step ---------------------------------------------------------------------------------------

    def take_messages(
        self, scheduler_output: SchedulerOutput, kv_caches: list[torch.Tensor], num_blocks: int
    ) -> None:
        """Do what the scheduler orders in addition to its schedule, and remove finished requests.

        Args:
            kv_caches: the runner's, of `num_blocks` blocks.
        """
        messages = read_messages(scheduler_output)
        self.tables.move_fronts(self._front_moves, self.tracker.block_size)
        self._front_moves = []
        self.tracker.copies = messages.get(PREFIXES, {})
        stage, page_size_bytes = self.pipeline.stage, self.layers.page_size_bytes
        pools = self.tracker.hooks.copy_blocks
        of_host: HostCopies | None = messages.get(TIER)
        if self.host_pool is not None and of_host is not None:
            self.host_pool.store(of_host)
        copy_blocks(scheduler_output, stage, kv_caches, num_blocks, page_size_bytes, pools)
        if self.host_pool is not None and of_host is not None:
            self.host_pool.load(of_host.loaded, scheduler_output)
        if self.late is not None:
            self.late.without = messages.get(WITHOUT_LEVELS, ())
            self.late.carry_out(messages.get(LEVELS, {}), self.tracker.order)
        if self._trace is not None:
            for request_id, (origin, point) in messages.get(SESSIONS, {}).items():
                self._trace.resume(request_id, origin, point)
        for request_id in scheduler_output.finished_req_ids:
            self.tracker.remove(request_id)
            if self._trace is not None:
                self._trace.forget(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            self.tracker.lose(request_id)

    def add_requests(self, requests: Sequence[NewRequestData]) -> None:
        """Make the plans of requests that have come, or that come again after a preemption."""
        for request in requests:
            params = request.sampling_params
            extra_args = params.extra_args if params is not None else None
            computed = request.num_computed_tokens
            self.tracker.add(request.req_id, request.prompt_len, extra_args, computed)

    def begin_step(
        self,
        request_ids: Sequence[str],
        prompt_lens: IntArray,
        computed: IntArray,
        scheduled: IntArray,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        slots: Slots | None = None,
    ) -> None:
        """Begin a step whose blocks vLLM knows already; arguments as of the tracker's.

        Args:
            seq_lens: `[rows]` int32 on the device, with the rows of padding.
            query_starts: `[rows + 1]` int32 on the device.
            slots: of the requests, where the runner holds the tables of all requests.
        """
        step = self.tracker.begin_step(request_ids, prompt_lens, computed, scheduled)
        self.tables.shift(seq_lens, query_starts, step, computed + scheduled, slots)

    @property
    def reports_errors(self) -> bool:
        """Whether the engine hears of an exception of this worker: it alone answers it."""
        return self.pipeline.is_last and self._ranks.rank == 0

    def idle_step(self, num_reqs: int, seq_lens: torch.Tensor, query_starts: torch.Tensor) -> None:
        """Begin a step without real requests: profiling, warm-up or graph capture."""
        self.tables.shift(seq_lens, query_starts, self.tracker.idle_step(num_reqs))

    def before_capture(self) -> None:
        """Forget the last step: vLLM captures graphs over metadata that belongs to no step."""
        self.tracker.idle_step(0)
        self.tables.forget_step()

    def end_step(self, output: Any) -> Any:
        """End the step, and attach its evictions to what the runner returns.

        Args:
            output: of vLLM's `sample_tokens`.
        """
        step, failures = self.tracker.step, self.tracker.failures
        evictions = step.evictions
        # All ranks have the same requests and evictions, so all of them call it, or none.
        if step.requests and self.tracker.hooks.may_fail(step):
            failures.sum_over_ranks(step.request_ids, self._ranks, self._device)
        elif evictions is not None:
            failures.sum_over_ranks(evictions.request_ids, self._ranks, self._device)
        if evictions is not None:
            self.pipeline.sum_over_stages(evictions)
        losses = self.late.take_losses() if self.late is not None else {}
        self._front_moves = front_moves(step)
        evicted, reports = self.tracker.end_step()
        if losses:
            reports[LEVELS] = losses
        dropped = 0
        if self._trace is not None and evictions is not None:
            dropped = self._trace.finish_step(evictions)
        failed = failures.take()
        if not self.pipeline.is_last:
            return output
        if self.host_pool is not None and (unwritten := self.host_pool.take_unwritten()):
            reports[HOST_CACHE] = unwritten
        return send_report(output, StepReport(evicted, reports, {}, dropped), failed)
