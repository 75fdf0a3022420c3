# SPDX-License-Identifier: Apache-2.0
"""No policy waits for the device in a step: prompts in chunks, evictions, decoding, all presets.

What runs is the worker's side of a step on shifted tables, as on CUDA; kernels are the reference,
vLLM's attention is left out. The same on the host must give the same cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretended_device import PretendedDevice, data_of
from tests.steps import make_call, make_side
from vllm_pyramid.ops import reference, triton_tables
from vllm_pyramid.ops.contract import Ops
from vllm_pyramid.policy import Policy, load_policy, policy_names
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.worker.context import LayerContext
from vllm_pyramid.worker.retention import Retention
from vllm_pyramid.worker.shifted import ShiftedTables

pytestmark = pytest.mark.cpu

LAYERS, KV_HEADS, HEADS, SIZE, BLOCK, BLOCKS, WIDTH = 2, 2, 4, 16, 16, 64, 10
PROMPTS = {"a": 70, "b": 45, "c": 101}
# Tokens of each step; all that a prompt needs at its end is in its last chunk.
STEPS = [
    {"a": 48, "b": 45},
    {"a": 22, "b": 1, "c": 48},
    {"a": 1, "b": 1, "c": 53},
    *({"a": 1, "b": 1, "c": 1} for _ in range(10)),
]
REFUSED = {"kcache", "pyramidinfer"}  # on CUDA
# One prompt is read back in the steps in which prompts with open lengths end.
SOLVED = "methods/solved/worker.py: numbers = "


# The pretended device ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "do"),
    [
        ("a number of the host's is assigned", lambda x, i: x.__setitem__(i, 0.0)),
        ("_local_scalar_dense", lambda x, i: x.sum().item()),
        ("_local_scalar_dense", lambda x, i: bool((x > 0).any())),
        ("_local_scalar_dense", lambda x, i: x[i.sum()]),
        ("an index of truth values", lambda x, i: x[x > 0]),
        ("an index of the host's", lambda x, i: x[torch.tensor([1])]),
        ("nonzero", lambda x, i: torch.nonzero(x)),
        ("a copy to the host", lambda x, i: x.cpu()),
        ("a copy to the host", lambda x, i: torch.zeros(4).copy_(x)),
        ("a copy of pageable memory", lambda x, i: x.copy_(torch.zeros(4), non_blocking=True)),
        ("a copy of pageable memory", lambda x, i: torch.zeros(4).to(x.device)),
        ("a copy of pageable memory", lambda x, i: torch.zeros(4).pin_memory().to(x.device)),
    ],
)
def test_what_waits_is_noted(what: str, do: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    with PretendedDevice() as device:
        x, index = torch.ones(4, device=device.device), torch.zeros(2, device=device.device).long()
        assert device.waits == []
        do(x, index)
    assert [name for name, _ in device.waits] == [what]


def test_what_does_not_wait_is_not_noted() -> None:
    with PretendedDevice() as device:
        x = torch.arange(4.0, device=device.device)
        assert x.device.type != "cpu" and x[1:].device == x.device
        y = torch.zeros(4).pin_memory().to(x.device, non_blocking=True)
        y[1:] = 2.0
        y[torch.zeros(1, dtype=torch.int64, device=x.device)] = x[3]
        y += torch.where(x > 1, x, 0) * torch.tensor(2.0)
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(4)
    assert device.waits == []
    assert data_of(y).tolist() == [3.0, 2.0, 6.0, 8.0]


# Steps -------------------------------------------------------------------------------------------


class Host:
    """The same without any device."""

    device = torch.device("cpu")

    def put(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def kernels(device: Any) -> Ops:
    """The reference, which asks for what keeps the kernels of CUDA from reading back."""
    launched = {
        name: device.launch(getattr(reference, name))
        for name in dir(Ops)
        if not name.startswith("_") and hasattr(reference, name)
    }

    def asks(name: str, known: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert known(*args, **kwargs), f"{name} would read a maximum back"
            return launched[name](*args, **kwargs)

        return call

    def of_mass(pages: Any, batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_query_len is not None and batch.max_seq_len is not None

    def of_window(batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_prompt_len is not None

    def of_select(*_: Any, max_keep: int | None = None, **kwargs: Any) -> bool:
        return max_keep is not None

    found: Any = SimpleNamespace(**launched)
    for name, known in (
        ("add_key_mass", of_mass),
        ("window_scores", of_window),
        ("window_scores_and_statistics", of_window),
        ("select", of_select),
    ):
        setattr(found, name, asks(name, known))
    return found


class Worker:
    """The steps of a worker whose attention reads shifted tables."""

    def __init__(self, policy: Policy, device: Any) -> None:
        self.device, self.ops = device, kernels(device)
        self.retention = Retention(policy, LAYERS, BLOCK, len(PROMPTS) + 1)
        side = make_side(
            LAYERS,
            heads=KV_HEADS,
            block_size=BLOCK,
            retention=self.retention,
            device=device.device,
        )
        self.retention.hooks = policy.worker_hooks(side)
        for hooks in self.retention.hooks:
            hooks.allocate(BLOCKS)
        self.shifted = ShiftedTables(LAYERS, len(PROMPTS), WIDTH, BLOCK, device.device)
        self.random = torch.Generator().manual_seed(1)
        rotary = Rotary(device.put(torch.rand(256, SIZE, generator=self.random)))
        self.contexts = [
            LayerContext(
                self.retention, layer, self.retention.hooks, None, rotary, None, self.shifted
            )
            for layer in range(LAYERS)
        ]
        shape = (LAYERS, BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        self.cache = torch.randn(shape, generator=self.random)
        order = torch.randperm(BLOCKS - 1, generator=self.random) + 1  # block 0 is nobody's
        self.tables = order[: LAYERS * len(PROMPTS) * WIDTH].int().view(LAYERS, -1, WIDTH)
        self.computed = dict.fromkeys(PROMPTS, 0)
        self.evictions = 0

    def step(self, scheduled: dict[str, int]) -> None:
        put, names = self.device.put, list(scheduled)
        columns = [
            np.array([source[name] for name in names], np.int32)
            for source in (PROMPTS, self.computed, scheduled)
        ]
        for name in names:
            if not self.computed[name]:
                self.retention.add(name, PROMPTS[name], None)
        step = self.retention.begin_step(names, *columns)
        _, computed, tokens = columns
        rows = len(names)
        own = self.tables[:, [list(PROMPTS).index(name) for name in names]]
        data_of(self.shifted.tables)[:, :rows] = own  # as vLLM fills them
        lens = torch.from_numpy(computed + tokens)
        self.shifted.update(put(lens), step.skips, computed + tokens)
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(tokens).cumsum(0)
        assert self.shifted.max_lens is not None
        for layer, context in enumerate(self.contexts):
            cache = put(self.cache[layer])
            caches = cache[..., :SIZE], cache[..., SIZE:]
            slots = torch.cat(
                [
                    own[layer, row][places // BLOCK].long() * BLOCK + places % BLOCK
                    for row in range(rows)
                    for places in [torch.arange(computed[row], computed[row] + tokens[row])]
                ]
            )
            count = int(tokens.sum())
            key, value = torch.randn(2, count, KV_HEADS, SIZE, generator=self.random)
            query = torch.randn(count, HEADS, SIZE, generator=self.random)
            self.ops.reshape_and_cache(put(key), put(value), *caches, put(slots))
            context.after_write(put(slots))
            call = make_call(
                self.shifted.tables[layer, :rows],
                layer=layer,
                ops=self.ops,
                query=put(query),
                caches=caches,
                starts=put(starts),
                lens=self.shifted.lens[layer, :rows],
                skips=self.shifted.no_skips[:rows],
                scale=SIZE**-0.5,
                rotary=context.rotary,
                offsets=self.shifted.skips[layer, :rows],
            )
            maxima = int(tokens.max()), int(self.shifted.max_lens[layer])
            batch = replace(call.batch, max_query_len=maxima[0], max_seq_len=maxima[1])
            context.after_attention(replace(call, batch=batch))
        self.evictions += len(self.retention.end_step()[0])
        for name in names:
            self.computed[name] += scheduled[name]


def launch_tables(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    for name in ("shift_block_tables", "effective_lens"):
        twin = getattr(triton_tables, f"{name}_reference{'_' if name.endswith('tables') else ''}")
        mine = f"{name}{'_' if name.endswith('tables') else ''}"
        monkeypatch.setattr(triton_tables, mine, device.launch(twin))


def policies() -> list[Policy]:
    """All presets that CUDA serves, and those with parts of their own."""
    found = []
    for name in policy_names():
        policy = load_policy(name)
        if policy.evicts and name not in REFUSED:
            args: dict[str, Any] = {"interval": 4} if policy.schedule.every else {}
            if policy.scorer.history is not None:
                args["scorer.queries"] = 4
            if policy.window:
                args["window"] = 16
            found.append(load_policy(name, "40", args=args))
    inside = {"window": 8, "chunk": {"tokens": 48, "keep": 24, "scorer": "keydiff"}}
    goal = load_policy("xkv", args={"window": 8, "retention": 0.5})
    return [*found, load_policy("pyramidkv", "24", args=inside), goal]


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    with PretendedDevice() as device:
        launch_tables(monkeypatch, device)
        worker = Worker(policy, device)
        for scheduled in STEPS:
            worker.step(scheduled)
    waits = [line for _, line in device.waits if not line.startswith(SOLVED)]
    assert waits == []
    solved = policy.allocator.solves
    assert len(device.waits) == (3 if solved else 0)  # three steps in which prompts end
    monkeypatch.undo()
    same = Host()
    launch_tables(monkeypatch, same)
    on_host = Worker(policy, same)
    for scheduled in STEPS:
        on_host.step(scheduled)
    assert on_host.evictions == worker.evictions > 0
    assert torch.equal(on_host.cache, worker.cache)
