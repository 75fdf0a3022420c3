# SPDX-License-Identifier: Apache-2.0
"""A worker's V in host memory: room beside the cache on a host of known size, what steps moved."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.conftest import build_batch
from tests.kernels.every_kernel import cpu
from tests.steps import make_context
from vllm_pyramid.compat import cpu_resources
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.kernels.cpu.library import scratch_bytes
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.host_values import worker
from vllm_pyramid.methods.host_values.traffic import StepTraffic
from vllm_pyramid.methods.host_values.worker import HostValueCache
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.step import Step, WorkerRequest

GIB, PAGE, LAYERS = 2**30, 2**20, 4


def make_cache(
    *, swap_space: float | None = None, device: str = "cpu", ranks: int = 1, **cache: Any
) -> HostValueCache:
    served = KVSettings(kv_policy="kcache", kv_swap_space=swap_space).served()
    assert served is not None
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None}
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096, original_max_model_len=4096),
        cache_config=SimpleNamespace(**{**sizes, **cache}),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    specs = [
        SimpleNamespace(page_size_bytes=PAGE, block_size=16 if layer == 0 else 32, layer_idx=layer)
        for layer in range(LAYERS)
    ]
    context = make_context(
        LAYERS,
        config=config,
        device=torch.device(device),
        specs=specs,
        swap_space_bytes=served.swap_space_bytes,
    )
    (found,) = served.policy.worker_hooks(context)
    assert isinstance(found, HostValueCache)
    return found


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`host(gib)`: so much memory is free."""

    def free(gib: float) -> None:
        monkeypatch.setattr(worker, "available_host_memory", lambda: int(gib * GIB))

    return free


def test_the_cpus_two_pools_share_what_one_would_have(host: Any) -> None:
    host(20)
    assert make_cache().limit_cache(18 * GIB) == 9 * GIB
    # A size that was asked for is kept, or refused.
    sized = make_cache(kv_cache_memory_bytes=9 * GIB)
    assert sized.limit_cache(9 * GIB) == 9 * GIB
    with pytest.raises(ValueError, match=r"11 GiB of host memory .* 9 GiB free"):
        make_cache(kv_cache_memory_bytes=11 * GIB).limit_cache(11 * GIB)


def test_a_gpus_host_has_its_memory_to_itself(host: Any) -> None:
    host(20)
    assert make_cache(device="cuda").limit_cache(18 * GIB) == 18 * GIB
    with pytest.raises(ValueError, match=r"36 GiB for 2; this host has 20 GiB free"):
        make_cache(device="cuda", ranks=2).limit_cache(18 * GIB)


def test_the_ranks_of_a_cpu_share_it_too(host: Any) -> None:
    host(20)
    cache = make_cache(swap_space=5, ranks=2)
    assert cache.limit_cache(18 * GIB) == 5 * GIB
    host(19)
    with pytest.raises(ValueError, match=r"10 GiB for 2; this host has 9 GiB free"):
        cache.limit_cache(18 * GIB)


def test_an_override_beyond_the_host_is_refused(host: Any) -> None:
    host(20)
    pages = 6 * GIB // PAGE
    with pytest.raises(ValueError, match="num-gpu-blocks-override"):
        make_cache(swap_space=5, num_gpu_blocks_override=pages).limit_cache(18 * GIB)


def test_a_length_that_vllm_will_fit_is_not_checked_before(host: Any) -> None:
    host(20)
    pages = LAYERS * 64  # of 4,096 tokens more than half
    cache = make_cache(swap_space=pages * PAGE / GIB)
    with pytest.raises(ValueError, match="max_model_len 4096"):
        cache.limit_cache(18 * GIB)
    cache.context.config.model_config.original_max_model_len = -1
    assert cache.limit_cache(18 * GIB) == pages * PAGE


@pytest.mark.parametrize(
    ("limit", "used", "gib"), [(None, None, 8), (6, 2, 4), (30, 1, 8), (3, 4, 0)]
)
def test_a_containers_limit_counts(monkeypatch, limit, used, gib) -> None:
    free = SimpleNamespace(available=8 * GIB)
    monkeypatch.setattr(cpu_resources.psutil, "virtual_memory", lambda: free)
    for name, value in (("limit", limit), ("usage", used)):
        bytes_ = None if value is None else value * GIB
        monkeypatch.setattr(
            cpu_resources, f"get_cgroup_memory_{name}", lambda bytes_=bytes_: bytes_
        )
    assert cpu_resources.available_host_memory() == gib * GIB


def test_a_thread_chooses_keys_within_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is new has no scratch yet, and gives it back at its end."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    longest, reserved = 4096, make_cache().bytes_of_buffers()
    batch = build_batch([longest], [2], kv_heads=1, group=16, head_size=64)
    top_ns, taken = torch.tensor([longest - 2], dtype=torch.int32), []

    def choose() -> None:
        before, out = scratch_bytes(), torch.empty_like(batch.query)
        cpu.topn_attention(out, batch.attention(), Softmax(0.125), top_ns)
        taken.append(scratch_bytes() - before)

    thread = Thread(target=choose)
    thread.start()
    thread.join()
    assert reserved / 2 < taken[0] <= reserved


def test_a_step_reports_what_it_moved_once() -> None:
    """V of new tokens, in all layers that keep it on the host, of all ranks."""
    cache = make_cache(ranks=2)
    assert cache.end_step(Step.nothing(LAYERS, 0)) is None
    for spec in cache.context.specs:
        spec.head_size, spec.num_kv_heads, spec.dtype = 32, 4, torch.float32
    policy = cache.policy
    plan = policy.plan(50, LAYERS, 32)
    full = load_policy("full")
    step = Step.nothing(LAYERS, 3)
    step.requests = [
        WorkerRequest(name, served, plan, plan)
        for name, served in (("prompt", policy), ("decodes", policy), ("full", full))
    ]
    step.prompt_lens = np.full(3, 50, np.int32)
    step.computed = np.array([20, 60, 70], np.int32)
    step.scheduled = np.array([30, 1, 1], np.int32)
    cache.begin_step(step)
    assert cache._top_ns.tolist() == [0, 128, 0]
    cache._value_rows += torch.tensor([5, 7, 9])
    row = 32 * 4 * 2
    report = cache.end_step(step)
    assert report == StepTraffic(
        ["prompt", "decodes", "full"],
        [count * row * 4 * (LAYERS - 1) for count in (30, 1, 1)],
        [5 * row, 7 * row, 9 * row],
        [0, 1, 1],
    )
    assert cache.end_step(step) is None
    step.scheduled = np.array([31, 1, 1], np.int32)
    with pytest.raises(RuntimeError, match="crosses the end of its prompt"):
        cache.begin_step(step)
