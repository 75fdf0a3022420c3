# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a policy. Importing vLLM's module replaces parts of torch: CPU only."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_pyramid.compat import config_hash, seeds
from vllm_pyramid.compat.cpu_resources import available_host_memory
from vllm_pyramid.compat.platform import cpu_platform
from vllm_pyramid.compat.platform.defaults import keep_threads, take_free_memory
from vllm_pyramid.worker.adapter import RunnerAdapter
from vllm_pyramid.worker.extend import extend_with_policy


class PyramidCpuWorker(CPUWorker):
    """Extends the model runner once vLLM has chosen and built it."""

    adapter: RunnerAdapter

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        cpu_platform.activate()  # where the process was forked from one without a policy
        take_free_memory(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        config_hash.install()
        seeds.install()
        if self.vllm_config.speculative_config is not None:
            keep_threads()
        super().init_device()
        self.adapter = extend_with_policy(self.model_runner, self.use_v2_model_runner)

    def determine_available_memory(self) -> int:
        """Return what vLLM finds, less what the policy takes, as on a GPU.

        Raises:
            ValueError: the host has no room for both, where the user has set the cache's size.
        """
        is_fixed = self.cache_config.kv_cache_memory_bytes is not None
        memory = self.adapter.pyramid.memory
        available = super().determine_available_memory()
        if is_fixed:
            memory.check_room(available, available_host_memory())
        return memory.reserve(available, is_fixed)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up as vLLM does; its warm-up requests leave no trace."""
        times = super().compile_or_warm_up_model()
        self.adapter.pyramid.start_trace()
        return times
