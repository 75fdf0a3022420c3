# SPDX-License-Identifier: Apache-2.0
"""How much memory the cache may have where V lies in host memory, against a host of known size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_pyramid.compat import cpu_resources
from vllm_pyramid.config import KVSettings
from vllm_pyramid.policy import load_policy
from vllm_pyramid.worker import host_values
from vllm_pyramid.worker.host_values import HostValuesMixin

pytestmark = pytest.mark.cpu

GIB, PAGE, LAYERS = 2**30, 2**20, 4


def make_runner(
    *, swap_space: float | None = None, device: str = "cpu", ranks: int = 1, **cache: Any
) -> HostValuesMixin:
    runner = HostValuesMixin()
    runner.device = torch.device(device)
    runner.retention = SimpleNamespace(policy=load_policy("kcache"))  # type: ignore[assignment]
    settings = KVSettings(kv_policy="kcache", kv_swap_space=swap_space)
    runner._settings = lambda: settings  # type: ignore[method-assign]
    runner._specs = {
        str(layer): SimpleNamespace(page_size_bytes=PAGE, block_size=16 if layer == 0 else 32)
        for layer in range(LAYERS)
    }  # type: ignore[assignment]
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None}
    runner.vllm_config = SimpleNamespace(  # type: ignore[assignment]
        model_config=SimpleNamespace(max_model_len=4096, original_max_model_len=4096),
        cache_config=SimpleNamespace(**{**sizes, **cache}),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    return runner


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`host(gib)`: so much memory is free."""

    def free(gib: float) -> None:
        monkeypatch.setattr(host_values, "available_host_memory", lambda: int(gib * GIB))

    return free


def test_the_cpus_two_pools_share_what_one_would_have(host: Any) -> None:
    host(20)
    assert make_runner().limit_cache_memory(18 * GIB) == 9 * GIB
    # A size that was asked for is kept, or refused.
    sized = make_runner(kv_cache_memory_bytes=9 * GIB)
    assert sized.limit_cache_memory(9 * GIB) == 9 * GIB
    with pytest.raises(ValueError, match=r"11 GiB of host memory .* 9 GiB free"):
        make_runner(kv_cache_memory_bytes=11 * GIB).limit_cache_memory(11 * GIB)


def test_a_gpus_host_has_its_memory_to_itself(host: Any) -> None:
    host(20)
    assert make_runner(device="cuda").limit_cache_memory(18 * GIB) == 18 * GIB
    with pytest.raises(ValueError, match=r"36 GiB for 2; this host has 20 GiB free"):
        make_runner(device="cuda", ranks=2).limit_cache_memory(18 * GIB)


def test_the_ranks_of_a_cpu_share_it_too(host: Any) -> None:
    host(20)
    runner = make_runner(swap_space=5, ranks=2)
    assert runner.limit_cache_memory(18 * GIB) == 5 * GIB
    host(19)
    with pytest.raises(ValueError, match=r"10 GiB for 2; this host has 9 GiB free"):
        runner.limit_cache_memory(18 * GIB)


def test_an_override_beyond_the_host_is_refused(host: Any) -> None:
    host(20)
    pages = 6 * GIB // PAGE
    with pytest.raises(ValueError, match="num-gpu-blocks-override"):
        make_runner(swap_space=5, num_gpu_blocks_override=pages).limit_cache_memory(18 * GIB)


def test_a_length_that_vllm_will_fit_is_not_checked_before(host: Any) -> None:
    host(20)
    pages = LAYERS * 64  # of 4,096 tokens more than half
    runner = make_runner(swap_space=pages * PAGE / GIB)
    with pytest.raises(ValueError, match="max_model_len 4096"):
        runner.limit_cache_memory(18 * GIB)
    runner.vllm_config.model_config.original_max_model_len = -1
    assert runner.limit_cache_memory(18 * GIB) == pages * PAGE


@pytest.mark.parametrize(
    ("limit", "used", "gib"), [(None, None, 8), (6, 2, 4), (30, 1, 8), (3, 4, 0)]
)
def test_a_containers_limit_counts(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, used: int | None, gib: int
) -> None:
    free = SimpleNamespace(available=8 * GIB)
    monkeypatch.setattr(cpu_resources.psutil, "virtual_memory", lambda: free)
    for name, value in (("limit", limit), ("usage", used)):
        bytes_ = None if value is None else value * GIB
        monkeypatch.setattr(
            cpu_resources, f"get_cgroup_memory_{name}", lambda bytes_=bytes_: bytes_
        )
    assert cpu_resources.available_host_memory() == gib * GIB
