# SPDX-License-Identifier: Apache-2.0
"""The worker for CUDA at start-up, with stand-ins for vLLM's worker and the runtime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from vllm_pyramid.worker.gpu_worker import PyramidGpuWorker

pytestmark = pytest.mark.cpu


class Memory:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def before_profile(self) -> None:
        self.calls.append("before the profile")

    def reserve(self, available: int, is_fixed: bool) -> int:
        return (available if is_fixed else available - 1500) // 2


class Runtime:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory = Memory(self.calls)

    def compile_kernels(self) -> None:
        self.calls.append("kernels of evictions")

    def start_trace(self) -> None:
        self.calls.append("traces")


def make_worker(kv_cache_memory_bytes: int | None = None, enable_jit_warmup: bool = True) -> Any:
    worker = object.__new__(PyramidGpuWorker)
    worker.adapter = SimpleNamespace(pyramid=Runtime())
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes)
    kernels = SimpleNamespace(enable_jit_warmup=enable_jit_warmup)
    worker.vllm_config = SimpleNamespace(kernel_config=kernels)
    return worker


@pytest.mark.parametrize("warms_up", [True, False])
def test_kernels_are_compiled_before_vllm_warms_up(
    monkeypatch: pytest.MonkeyPatch, warms_up: bool
) -> None:
    """Behind vLLM's warm-up graphs are captured, and compilers are watched."""
    worker = make_worker(enable_jit_warmup=warms_up)
    calls = worker.adapter.pyramid.calls
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda self: calls.append("vLLM"))
    worker.compile_or_warm_up_model()
    assert calls == [*["kernels of evictions"] * warms_up, "vLLM", "traces"]


def test_tables_are_taken_out_of_what_vllm_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker()
    calls = worker.adapter.pyramid.calls

    def determine(self: Any) -> int:
        calls.append("vLLM")
        return 5000

    monkeypatch.setattr(Worker, "determine_available_memory", determine)
    assert worker.determine_available_memory() == (5000 - 1500) // 2
    assert calls == ["before the profile", "vLLM"]


def test_a_size_that_the_user_chose_is_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(kv_cache_memory_bytes=4000)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 4000)
    assert worker.determine_available_memory() == 2000


def test_a_size_that_vllm_remembers_is_one_that_it_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`VLLM_ENABLE_STARTUP_PLAN`: of an earlier start, whose tables it did not know either."""
    worker = make_worker()

    def determine(self: Any) -> int:
        self.cache_config.kv_cache_memory_bytes = 5000
        return 5000

    monkeypatch.setattr(Worker, "determine_available_memory", determine)
    assert worker.determine_available_memory() == (5000 - 1500) // 2
