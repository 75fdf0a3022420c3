# SPDX-License-Identifier: Apache-2.0
"""All kernels are launched before serving, so that no request waits for a compiler."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver
from triton.runtime import jit

from tests.kernels.every_kernel import triton_ops
from tests.shifted_worker import HEADS, SIZE, Host, Worker, launch_tables, policies, vllms_attention
from vllm_pyramid.attention import backend_cuda
from vllm_pyramid.attention.backend_cuda import PyramidImplMixin
from vllm_pyramid.kernels.triton import lanes as triton_lanes
from vllm_pyramid.kernels.triton import tables as triton_tables
from vllm_pyramid.methods.accumulated.gather import KeyMass
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.worker.warm_up import compile_kernels, lengths_of

KERNELS = {
    "gather_tables": triton_tables.gather_tables,
    "lane_rows": triton_lanes.lane_rows,
    "lane_slots": triton_lanes.lane_slots,
}
# Of all constants that follow from lengths.
PROMPTS = {"a": 61, "b": 130, "c": 257, "d": 515, "e": 1100, "f": 2300, "g": 90}


class _Driver:
    """As much of one as it takes to work out keys."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "keys"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of all launches so far: the kernel and everything that it is compiled for."""
    found: set[str] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _, of_keys, *_, binder = self.device_caches["keys"]
        _, specialization, options = binder(*args, **kwargs)
        found.add(f"{self.__name__} {jit.compute_cache_key(of_keys, specialization, options)}")

    monkeypatch.setattr(triton_driver, "_active", _Driver())
    monkeypatch.setattr(jit.JITFunction, "run", run)
    return found


class Launched(Host):
    """Launches Triton's kernel, which does nothing, and runs the reference."""

    def launch(self, function: Any) -> Any:
        if function is vllms_attention:
            return function
        name = function.__name__.replace("_reference", "")
        kernel = KERNELS.get(name) or getattr(triton_ops, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            if name != "reshape_and_cache":  # vLLM's own does that
                kernel(*args, **kwargs)
            return function(*args, **kwargs)

        return both


class Impl(PyramidImplMixin):
    head_size, num_heads, scale, logits_soft_cap, kv_cache_dtype = SIZE, HEADS, 0.25, 0.0, "auto"


def make_worker(policy: Policy, monkeypatch: pytest.MonkeyPatch, *, held: bool = True) -> Worker:
    device = Launched()
    worker = Worker(policy, device, PROMPTS, at_step_end=True, held=held, spare=4096)
    monkeypatch.setattr(backend_cuda, "get_ops", lambda device_type: worker.ops)
    launch_tables(monkeypatch, device)
    return worker


def warm_up(worker: Worker, **options: Any) -> None:
    layers = []
    for context in worker.contexts:
        impl = Impl()
        impl.context = context
        cache = worker.kv_cache(context.layer)
        layers.append((context, SimpleNamespace(impl=impl, kv_cache=cache)))
    compile_kernels(layers, worker.longest, torch.float32, **options)


def serve(worker: Worker) -> None:
    """All prompts, each in as many pieces as it has evictions; then some tokens of each.

    Where V is fetched for the pieces they are short.
    """
    waiting, running = list(PROMPTS), []
    most = 96 if worker.copies is not None else max(PROMPTS.values())
    while waiting or any(worker.computed[name] < PROMPTS[name] for name in running):
        running += waiting[:1]
        del waiting[:1]
        scheduled = {}
        for name in running:
            computed, length = worker.computed[name], PROMPTS[name]
            if not computed:
                worker.tracker.add(name, length, None)
            plan = worker.tracker._requests[name].plan
            ends = plan.next_eviction(computed) if computed < length else computed + 1
            if (piece := plan.piece_at(computed)) is not None:
                ends = piece.end
            scheduled[name] = min(ends or length, max(length, computed + 1)) - computed
            scheduled[name] = min(scheduled[name], most)
        # As where other requests find the prompts that evictions overwrite.
        worker.step(scheduled, copies=worker.joins and worker.lanes == 1)
        random.Random(len(waiting)).shuffle(running)
    for count in range(len(running), 0, -1):
        worker.step(dict.fromkeys(running[:count], 1))


# Pieces of all widths, in addition to the short ones.
ALL = [*policies(), load_policy("pyramidinfer")]


@pytest.mark.long
@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_no_key_comes_up_while_serving(monkeypatch, keys, policy) -> None:
    worker = make_worker(policy, monkeypatch)
    warm_up(worker)
    compiled = set(keys)
    assert compiled and not any(worker.computed.values())
    serve(worker)
    assert worker.evictions > 3 or not policy.evicts
    assert keys - compiled == set()
    names = ("gather_tables_kernel", "lane_rows_kernel", "lane_slots_kernel")
    launched = [any(key.startswith(name) for key in compiled) for name in names]
    assert launched == [True, *[policy.heads.splits] * 2]


@pytest.mark.parametrize("name", ["pyramidkv", "duoattention"])
def test_no_key_comes_up_where_vllm_fills_the_tables(monkeypatch, keys, name) -> None:
    """As under its first runner, whose tables are shifted in place."""
    policy = next(policy for policy in policies() if policy.name == name)
    worker = make_worker(policy, monkeypatch, held=False)
    warm_up(worker)
    compiled = set(keys)
    for request, length in PROMPTS.items():
        worker.step({request: length})
    worker.step(dict.fromkeys(PROMPTS, 1))
    assert any(key.startswith("gather_tables") for key in compiled)
    assert not {key for key in keys - compiled if key.startswith(("gather", "lane"))}


@pytest.mark.parametrize("name", ["pyramidkv", "h2o"])
def test_nothing_changes_but_the_null_block(monkeypatch, keys, name) -> None:
    policy = next(policy for policy in policies() if policy.name == name)
    worker = make_worker(policy, monkeypatch)
    before = worker.cache.clone()
    warm_up(worker)
    assert torch.equal(worker.cache[1:], before[1:])
    assert not any(table.any() for table in worker.shifted.tables)
    assert not worker.tracker._requests
    for hooks in worker.tracker.hooks:
        assert isinstance(hooks, KeyMass)
        assert not hooks.pages[1:].any()


def test_a_trace_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch, keys: set[str]) -> None:
    policy = next(policy for policy in policies() if policy.name == "keydiff")
    worker = make_worker(policy, monkeypatch)
    warm_up(worker)
    assert not any(key.startswith("window_mass") for key in keys)
    warm_up(worker, traces=True)
    assert any(key.startswith("window_mass") for key in keys)


def test_lengths() -> None:
    policy = next(policy for policy in policies() if policy.name == "pyramidkv")
    least = policy.sinks + policy.window + 2
    found = lengths_of(policy, 1 << 20)
    assert {128, 256, 512, 1024, 2048, 4096} <= set(found)
    assert {n + policy.window for n in (128, 256, 512, 1024, 2048, 4096)} <= set(found)
    assert min(found) == least
    # Of lengths that do not fit the longest that does is there.
    assert max(lengths_of(policy, 1500)) == 1500
    assert lengths_of(policy, least - 1) == []
