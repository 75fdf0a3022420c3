# SPDX-License-Identifier: Apache-2.0
"""Make a worker's finished model runner follow the policy."""

from __future__ import annotations

from typing import Any

from vllm_pyramid.compat.runner import extend_runner
from vllm_pyramid.worker.adapter import RunnerAdapter


def extend_with_policy(runner: Any, uses_v2: bool) -> RunnerAdapter:
    """Put the adapter in front of the runner's class; only that runner's modules are imported."""
    if uses_v2:
        from vllm_pyramid.worker.adapter_v2 import AdapterV2

        return extend_runner(runner, AdapterV2)
    from vllm_pyramid.worker.adapter_v1 import AdapterV1

    return extend_runner(runner, AdapterV1)
