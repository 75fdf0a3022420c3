# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with a policy."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_pyramid.compat import config_hash
from vllm_pyramid.compat.backend_names import BACKENDS
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.worker.adapter import RunnerAdapter
from vllm_pyramid.worker.extend import extend_with_policy


class PyramidGpuWorker(Worker):
    """Extends the model runner once vLLM has chosen and built it."""

    adapter: RunnerAdapter

    def init_device(self) -> None:
        settings = ServedSettings.of(self.vllm_config)
        assert settings is not None and settings.backend is not None
        config_hash.install()
        register_backend(AttentionBackendEnum.CUSTOM, BACKENDS[settings.backend])
        super().init_device()
        self.adapter = extend_with_policy(self.model_runner, self.use_v2_model_runner)

    def determine_available_memory(self) -> int:
        """Return what vLLM finds, less the policy's tables and buffers and its share of each block.

        What evictions take is subtracted, too. Nothing but the share of each block is subtracted
        from a cache whose size the user has set.
        """
        is_fixed = self.cache_config.kv_cache_memory_bytes is not None
        memory = self.adapter.pyramid.memory
        memory.before_profile()
        return memory.reserve(super().determine_available_memory(), is_fixed)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile the kernels of evictions, then warm up as vLLM does, without a trace.

        The kernels come first because vLLM captures graphs and begins to watch compilers at the end
        of its warm-up. They are not compiled where vLLM compiles none (`--enforce-eager`).
        """
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self.adapter.pyramid.compile_kernels()
        times = super().compile_or_warm_up_model()
        self.adapter.pyramid.start_trace()
        return times
