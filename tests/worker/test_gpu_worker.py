# SPDX-License-Identifier: Apache-2.0
"""The worker for CUDA at start-up, with stand-ins for vLLM's worker and the runtime."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.entrypoints.serve.utils import fingerprint
from vllm.v1.worker import startup_plan
from vllm.v1.worker.gpu_worker import Worker

from vllm_pyramid.compat import config_hash
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy.served_settings import SERVED_KEY
from vllm_pyramid.worker import gpu_worker
from vllm_pyramid.worker.gpu_worker import PyramidGpuWorker


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
def test_kernels_are_compiled_before_vllm_warms_up(monkeypatch, warms_up) -> None:
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


def test_a_size_that_vllm_remembers_is_one_that_it_measured(monkeypatch) -> None:
    """`VLLM_ENABLE_STARTUP_PLAN`: of an earlier start, whose tables it did not know either."""
    worker = make_worker()

    def determine(self: Any) -> int:
        self.cache_config.kv_cache_memory_bytes = 5000
        return 5000

    monkeypatch.setattr(Worker, "determine_available_memory", determine)
    assert worker.determine_available_memory() == (5000 - 1500) // 2


def test_a_worker_compiles_by_what_a_graph_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which has the configuration and not the front end."""
    for module, name in (
        (startup_plan, "compute_plan_fingerprint"),
        (fingerprint, "build_system_fingerprint"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setattr(VllmConfig, "compute_hash", config_hash._stock_hash)
    monkeypatch.setattr(gpu_worker, "register_backend", lambda *_: None)
    monkeypatch.setattr(gpu_worker, "extend_with_policy", lambda *_: None)
    monkeypatch.setattr(Worker, "init_device", lambda self: None)
    keys = set()
    for budget in ("12%", "25%"):
        served = KVSettings("pyramidkv", kv_budget=budget).served()
        assert served is not None
        served = replace(served, backend="FLASH_ATTN")
        config = VllmConfig()
        config.additional_config = config_hash.SettingsWithKey(
            {SERVED_KEY: served.as_data()}, {SERVED_KEY: served.of_graph}
        )
        worker = make_worker()
        worker.vllm_config, worker.model_runner, worker.use_v2_model_runner = config, None, True
        worker.init_device()
        keys.add(config.compute_hash())
    assert len(keys) == 1
