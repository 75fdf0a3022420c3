# SPDX-License-Identifier: Apache-2.0
"""The worker's side of steps whose attention reads shifted tables, as on CUDA, without vLLM.

Kernels are the reference, vLLM's attention is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretended_device import data_of
from tests.steps import make_call, make_side
from vllm_pyramid.ops import reference, triton_tables
from vllm_pyramid.ops.contract import Ops
from vllm_pyramid.policy import Policy, load_policy, policy_names
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.worker.context import LayerContext
from vllm_pyramid.worker.retention import Retention
from vllm_pyramid.worker.shifted import ShiftedTables

LAYERS, KV_HEADS, HEADS, SIZE, BLOCK = 2, 2, 4, 16, 16
REFUSED = {"kcache", "pyramidinfer"}  # on CUDA


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
    """The steps of a worker whose attention reads shifted tables.

    Args:
        prompts: their lengths by name. answer: tokens that may follow them.
    """

    def __init__(
        self, policy: Policy, device: Any, prompts: Mapping[str, int], answer: int = 32
    ) -> None:
        self.device, self.ops, self.prompts = device, kernels(device), prompts
        width = -(-(max(prompts.values()) + answer) // BLOCK)
        blocks = LAYERS * len(prompts) * width + 1
        self.retention = Retention(policy, LAYERS, BLOCK, len(prompts) + 1)
        side = make_side(
            LAYERS,
            heads=KV_HEADS,
            block_size=BLOCK,
            retention=self.retention,
            device=device.device,
        )
        self.retention.hooks = policy.worker_hooks(side)
        for hooks in self.retention.hooks:
            hooks.allocate(blocks)
        self.shifted = ShiftedTables(slice(0, LAYERS), len(prompts), width, BLOCK, device.device)
        self.random = torch.Generator().manual_seed(1)
        rotary = Rotary(device.put(torch.rand(4096, SIZE, generator=self.random)))
        self.contexts = [
            LayerContext(
                self.retention, layer, self.retention.hooks, None, rotary, None, self.shifted
            )
            for layer in range(LAYERS)
        ]
        shape = (LAYERS, blocks, KV_HEADS, BLOCK, 2 * SIZE)
        self.cache = torch.randn(shape, generator=self.random)
        order = torch.randperm(blocks - 1, generator=self.random) + 1  # block 0 is nobody's
        self.tables = order.int().view(LAYERS, len(prompts), width)
        self.computed = dict.fromkeys(prompts, 0)
        self.evictions = 0

    def step(self, scheduled: dict[str, int]) -> None:
        put, names = self.device.put, list(scheduled)
        columns = [
            np.array([source[name] for name in names], np.int32)
            for source in (self.prompts, self.computed, scheduled)
        ]
        for name in names:
            if not self.computed[name]:
                self.retention.add(name, self.prompts[name], None)
        step = self.retention.begin_step(names, *columns)
        _, computed, tokens = columns
        rows = len(names)
        own = self.tables[:, [list(self.prompts).index(name) for name in names]]
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
