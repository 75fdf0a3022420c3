# SPDX-License-Identifier: Apache-2.0
"""The layers of a worker under each back end, without a model: CPU, and CUDA as rehearsed there.

In place of vLLM's CUDA attention the reference reads the stock metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.steps import make_context
from vllm_pyramid.attention.backend_cpu import PyramidCpuImpl
from vllm_pyramid.attention.backend_cuda import PyramidImplMixin
from vllm_pyramid.attention.cpu_metadata import PyramidCpuMetadata
from vllm_pyramid.attention.deferred import DeferredEviction
from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.attention.shifted_tables import ShiftedTables
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.policy import Policy
from vllm_pyramid.step.hooks import MethodHooks, WorkerContext, WorkerHooks
from vllm_pyramid.worker.eviction_tracker import EvictionTracker
from vllm_pyramid.worker.step_tables import StepTables

LAYERS, KV_HEADS, HEADS, SIZE, BLOCK = 2, 2, 4, 16, 8
SCALE = SIZE**-0.5


class StockImpl:
    """vLLM's attention on CUDA, as far as ours builds on it."""

    head_size, scale, logits_soft_cap, kv_cache_dtype = SIZE, SCALE, 0.0, "auto"

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        caches = kv_cache[..., :SIZE], kv_cache[..., SIZE:]
        reference.reshape_and_cache(key, value, *caches, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        batch = AttentionBatch(
            query,
            kv_cache[..., :SIZE],
            kv_cache[..., SIZE:],
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            torch.zeros_like(metadata.seq_lens),
        )
        assert int(metadata.seq_lens.max()) <= metadata.max_seq_len
        reference.paged_attention(output, batch, Softmax(SCALE))
        return output


class CudaImpl(PyramidImplMixin, StockImpl):
    """Ours over it."""


class BackEnd:
    """Steps of all layers.

    Args:
        name: cpu or cuda. prompts: their lengths by name; at most 64 tokens may follow each.
        more: makes hooks that work in addition to the policy's.

    Attributes:
        cache: `[P, G, N, 2 * D]` of all layers, in the layout of the back end.
        outs: of the latest step each layer's attention, `[T, H, D]`. queries: the same.
        before: of the latest step and each layer, the cache when it was written.
        reports: of the latest step.
        scales: of a fused quantisation of the output, which vLLM's CUDA backends are given.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        prompts: Mapping[str, int],
        more: Sequence[Callable[[WorkerContext], WorkerHooks]] = (),
    ) -> None:
        self.name, self.prompts = name, prompts
        width = -(-(max(prompts.values()) + 64) // BLOCK)
        self.num_blocks = 3 * LAYERS * len(prompts) * width  # with some to copy to
        self.tracker = EvictionTracker(policy, LAYERS, BLOCK, len(prompts) + 1)
        context = make_context(LAYERS, heads=KV_HEADS, block_size=BLOCK, tracker=self.tracker)
        own = [make(context) for make in more]
        self.hooks = MethodHooks([*policy.worker_hooks(context), *own])
        self.tracker.hooks = self.hooks
        for hooks in self.hooks.cache:
            hooks.allocate(self.num_blocks)
        self.random = torch.Generator().manual_seed(7)
        shape = (self.num_blocks, KV_HEADS, BLOCK, 2 * SIZE)
        self.cache = torch.full(shape, torch.nan)
        order = torch.randperm(self.num_blocks - 1, generator=self.random).int() + 1
        used = LAYERS * len(prompts) * width
        self.tables = order[:used].view(LAYERS, len(prompts), width)
        self.spare: list[int] = order[used:].tolist()
        self.shifted: ShiftedTables | None = None
        if name == "cuda":
            self.shifted = ShiftedTables(
                slice(0, LAYERS), len(prompts), [(width, BLOCK)] * LAYERS, torch.device("cpu")
            )
        deferred = DeferredEviction.of(policy, self.hooks, LAYERS)
        self.impls: list[Any] = []
        for layer in range(LAYERS):
            impl: Any = CudaImpl()
            if name == "cpu":
                impl = PyramidCpuImpl(HEADS, SIZE, SCALE, KV_HEADS)
            impl.context = LayerContext(
                self.tracker, layer, self.hooks, shifted=self.shifted, deferred=deferred
            )
            self.impls.append(impl)
        self.computed = dict.fromkeys(prompts, 0)
        self.reports: dict[str, Any] = {}
        self.scales: tuple[torch.Tensor, ...] = ()
        self.outs: list[torch.Tensor] = []
        self.queries: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []

    def parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a cache, `[P, G, N, D]` each."""
        if self.name == "cuda":
            return cache[..., :SIZE], cache[..., SIZE:]
        planes = cache.view(len(cache), KV_HEADS, 2 * BLOCK, SIZE)
        return planes[:, :, :BLOCK], planes[:, :, BLOCK:]

    def held(self, cache: torch.Tensor, layer: int, name: str, first: int) -> Any:
        """K and V of a request from position `first` on: `[n, G, D]` each."""
        table = self.tables[layer, list(self.prompts).index(name)]
        positions = torch.arange(first, self.computed[name])
        blocks, rows = table[positions // BLOCK].long(), positions % BLOCK
        return [part[blocks, :, rows] for part in self.parts(cache)]

    def skip(self, layer: int, name: str) -> int:
        """Tokens that a layer has given up of a request, as of the latest step."""
        step = self.tracker.step
        names = [request.request_id for request in step.requests]
        return int(step.skips[layer, names.index(name)])

    def step(self, scheduled: dict[str, int]) -> None:
        """One step; K of a token are numbers of its own."""
        names = list(scheduled)
        columns = [
            np.array([source[name] for name in names], np.int32)
            for source in (self.prompts, self.computed, scheduled)
        ]
        for name in names:
            if not self.computed[name]:
                self.tracker.add(name, self.prompts[name], None)
        step = self.tracker.begin_step(names, *columns)
        _, computed, tokens = columns
        own = self.tables[:, [list(self.prompts).index(name) for name in names]]
        starts = torch.zeros(len(names) + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(tokens).cumsum(0)
        lens = torch.from_numpy(computed + tokens)
        if self.shifted is not None:
            for table, layer in zip(self.shifted.tables, own, strict=True):
                table[: len(names)] = layer
            StepTables.shift(self, lens, starts, step, computed + tokens)  # type: ignore[arg-type]
        self.outs, self.queries, self.before = [], [], []
        for layer, impl in enumerate(self.impls):
            count = int(tokens.sum())
            key, value = torch.randn(2, count, KV_HEADS, SIZE, generator=self.random)
            query = torch.randn(count, HEADS, SIZE, generator=self.random)
            slots = [
                own[layer, row][places // BLOCK].long() * BLOCK + places % BLOCK
                for row in range(len(names))
                for places in [torch.arange(computed[row], computed[row] + tokens[row])]
            ]
            impl.do_kv_cache_update(None, key, value, self.cache, torch.cat(slots))
            self.before.append(self.cache.clone())
            out = torch.full_like(query, torch.nan)
            metadata = self.metadata(layer, own[layer], starts, lens)
            impl.forward(None, query, key, value, self.cache, metadata, out, *self.scales)
            self.outs.append(out)
            self.queries.append(query)
        for name in names:
            self.computed[name] += scheduled[name]
        _, self.reports = self.tracker.end_step()

    def metadata(
        self, layer: int, table: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor
    ) -> Any:
        rows, step = len(lens), self.tracker.step
        if self.shifted is None:
            skips = torch.from_numpy(step.skips[layer])
            return PyramidCpuMetadata(int(starts[-1]), table, starts, lens, skips)
        assert self.shifted.max_lens is not None
        return SimpleNamespace(
            block_table=self.shifted.tables[layer][:rows],
            query_start_loc=starts,
            seq_lens=self.shifted.lens[layer, :rows],
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            max_seq_len=int(self.shifted.max_lens[layer]),
            num_actual_tokens=int(starts[-1]),
            kv_step=step,
            kv_no_skips=self.shifted.no_skips[:rows],
            kv_offsets=self.shifted.skips[layer, :rows],
        )
