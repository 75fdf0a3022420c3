# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with a policy."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_pyramid.worker.runner import extend_with_policy


class PyramidGpuWorker(Worker):
    """Extends the model runner once vLLM has chosen and built it."""

    def init_device(self) -> None:
        super().init_device()
        extend_with_policy(self.model_runner, self.use_v2_model_runner)
