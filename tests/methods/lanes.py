# SPDX-License-Identifier: Apache-2.0
"""A worker's layers whose KV heads have block tables and lengths of their own, without vLLM.

Shape legend: L layers, G KV heads, n tokens of a prompt, N tokens of a lane's block, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.steps import make_call, make_context
from vllm_pyramid.attention.deferred import DeferredEviction
from vllm_pyramid.attention.per_head.layout import HeadTableLayout
from vllm_pyramid.kernels import reference
from vllm_pyramid.plan import EvictionPoint
from vllm_pyramid.policy import Policy
from vllm_pyramid.step.hooks import MethodHooks
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

L, G, GROUP, N, D = 3, 2, 2, 8, 16


def are_best(scores: torch.Tensor, total: int, safe: int) -> torch.Tensor:
    """The joint choice of heads: `[G, n]` bool; lower positions win ties, then lower heads."""
    marked = scores.double().clone()
    for head in marked:
        head[head.argsort(descending=True, stable=True)[:safe]] = torch.inf
    order = marked.T.flatten().argsort(descending=True, stable=True)[:total]
    chosen = torch.zeros(marked.numel(), dtype=torch.bool)
    chosen[order] = True
    return chosen.view(-1, len(scores)).T


class Prompts:
    """Prompts that end in one step, in caches whose KV heads have tables of their own."""

    def __init__(
        self, policy: Policy, lens: list[int], *, ops: Any = reference, alike: bool = False
    ) -> None:
        self.policy, self.lens, self.ops = policy, lens, ops
        self.names = [f"r{index}" for index in range(len(lens))]
        self.tracker = EvictionTracker(policy, L * G, N, len(lens))
        for name, n in zip(self.names, lens, strict=True):
            self.tracker.add(name, n, None)
        numbers = np.array(lens, np.int32)
        step = self.tracker.begin_step(self.names, numbers, np.zeros_like(numbers), numbers)
        assert step.evictions is not None
        self.evictions = step.evictions
        context = make_context(L, heads=1, block_size=N, tracker=self.tracker, tables_per_layer=G)
        self.hooks = MethodHooks(policy.worker_hooks(context))
        self.deferred = DeferredEviction.of(policy, self.hooks, L * G)
        width = -(-max(lens) // N)
        order = torch.randperm(len(lens) * G * width, generator=torch.Generator().manual_seed(9))
        self.tables = order.int().view(len(lens) * G, width)
        self.rows = [[self._tokens(n, layer, alike) for n in lens] for layer in range(L)]
        self.caches = [self._cache(rows) for rows in self.rows]

    def _tokens(self, n: int, layer: int, alike: bool) -> torch.Tensor:
        """`[2, G, n, D]` of a prompt, whatever the batch; small whole numbers, so norms are equal
        in many places."""
        random = torch.Generator().manual_seed(100 * n + layer)
        found = torch.randint(-1, 2, (2, G, n, D), generator=random).float()
        if alike:
            return found[:, :1].expand(-1, G, -1, -1).clone()
        found[0] *= torch.tensor([1.0, 1.25])[:, None, None]  # heads differ, so that lengths do
        return found

    def _cache(self, rows: list[torch.Tensor]) -> torch.Tensor:
        caches = torch.full((2, self.tables.numel(), 1, N, D), 7.0)
        for lane, table in enumerate(self.tables.long()):
            tokens = rows[lane // G][:, lane % G]
            places = torch.arange(tokens.shape[1])
            caches[:, table[places // N], 0, places % N] = tokens
        return caches

    def run(self, layers: range = range(L)) -> None:
        lens = torch.tensor(self.lens, dtype=torch.int32)
        lanes = lens.repeat_interleave(G)
        starts = torch.nn.functional.pad(lanes.cumsum(0), (1, 0)).int()
        query = torch.zeros(sum(self.lens), G * GROUP, D)
        for layer in layers:
            inputs = make_call(
                self.tables,
                layer=layer,
                ops=self.ops,
                query=query,
                caches=(self.caches[layer][0], self.caches[layer][1]),
                starts=starts,
                lens=lanes,
                skips=torch.zeros_like(lanes),
            )
            make = HeadTableLayout(G, N).context_factory()
            context = make(self.tracker, layer, self.hooks, deferred=self.deferred)
            context.after_attention(inputs, query)

    def keep(self, row: int) -> np.ndarray:
        """`[L, G]`."""
        point = self.evictions.plans[row]
        assert isinstance(point, EvictionPoint)
        return point.keep.reshape(L, G)

    def held(self, row: int, layer: int, head: int) -> torch.Tensor:
        """`[2, tokens, D]` that a lane holds now."""
        n, count = self.lens[row], int(self.evictions.kept_lens[layer * G + head, row])
        table = self.tables[row * G + head]
        found = [reference.gather_tokens(x, table, n - count, n) for x in self.caches[layer]]
        return torch.stack(found)[:, :, 0]
