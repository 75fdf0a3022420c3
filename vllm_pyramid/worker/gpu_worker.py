# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with a policy."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_pyramid.compat.backend_names import BACKENDS
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.worker.extend import extend_with_policy

logger = init_logger(f"vllm.{__name__}")


class PyramidGpuWorker(Worker):
    """Extends the model runner once vLLM has chosen and built it."""

    def init_device(self) -> None:
        settings = ServedSettings.of(self.vllm_config)
        assert settings is not None and settings.backend is not None
        register_backend(AttentionBackendEnum.CUSTOM, BACKENDS[settings.backend])
        super().init_device()
        extend_with_policy(self.model_runner, self.use_v2_model_runner)

    def determine_available_memory(self) -> int:
        """vLLM's, less what the policy keeps beside the cache, and no more than it allows.

        Where the user says how large the cache is, tables and buffers come on top of it.
        """
        is_fixed = self.cache_config.kv_cache_memory_bytes is not None
        self.model_runner.before_profile()
        available = super().determine_available_memory()
        if not is_fixed:
            tables = self.model_runner.bytes_of_tables()
            buffers = self.model_runner.bytes_of_buffers()
            available -= tables + buffers
            logger.info(
                "kv-policy: %.2f GiB are for the block tables of all layers and %.2f GiB for the "
                "policy's own buffers, %.2f GiB are left for the KV cache; a smaller "
                "--max-num-seqs or --max-model-len makes them smaller",
                tables / 2**30,
                buffers / 2**30,
                available / 2**30,
            )
        room: int = self.model_runner.room_for_cache(available)
        return room

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's; the requests of its own that it warms up with leave no trace.

        Before that, so that graphs are captured last and vLLM's watch on compilers begins behind
        it, the kernels of evictions are compiled, unless kernels are not to be (`--enforce-eager`).
        """
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self.model_runner.compile_kernels()
        times = super().compile_or_warm_up_model()
        self.model_runner.start_trace()
        return times
