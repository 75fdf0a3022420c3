# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with a policy."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_pyramid.config import ServedSettings
from vllm_pyramid.worker.backend_names import BACKENDS
from vllm_pyramid.worker.extend import extend_with_policy


class PyramidGpuWorker(Worker):
    """Extends the model runner once vLLM has chosen and built it."""

    def init_device(self) -> None:
        settings = ServedSettings.of(self.vllm_config)
        assert settings is not None and settings.backend is not None
        register_backend(AttentionBackendEnum.CUSTOM, BACKENDS[settings.backend])
        super().init_device()
        extend_with_policy(self.model_runner, self.use_v2_model_runner)

    def determine_available_memory(self) -> int:
        """vLLM's, less what the policy keeps beside the cache, and no more than it allows."""
        available: int = self.model_runner.room_for_cache(super().determine_available_memory())
        return available

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's; the requests of its own that it warms up with leave no trace."""
        times = super().compile_or_warm_up_model()
        self.model_runner.start_trace()
        return times
