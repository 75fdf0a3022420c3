# SPDX-License-Identifier: Apache-2.0
"""Make a worker's finished model runner follow the policy."""

from __future__ import annotations

from typing import Any

from vllm_pyramid.compat.runner import extend_runner


def extend_with_policy(runner: Any, uses_v2: bool) -> None:
    """Give the runner the methods of ours; `uses_v2` says which of vLLM's two it is."""
    if uses_v2:
        from vllm_pyramid.worker.adapter_v2 import PyramidRunnerV2

        extend_runner(runner, PyramidRunnerV2)
    else:
        from vllm_pyramid.worker.adapter_v1 import PyramidRunnerV1

        extend_runner(runner, PyramidRunnerV1)
