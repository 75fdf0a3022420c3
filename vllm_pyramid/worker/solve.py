# SPDX-License-Identifier: Apache-2.0
"""Eviction of prompts whose lengths are solved from the scores of all layers.

    layer 0 .. L-2    attention, scores: both kept until the step's last layer has come
    layer L-1         attention, scores -> solve -> select and compact all layers

No layer is shortened before the last one has attended, and the next step's skips are those that
were solved here. What is kept meanwhile is `[S, G, context]` float32 a layer for the S prompts that
end: 32 bytes a prompt token and layer for 8 KV heads.

Shape legend: L layers, S prompts that are solved, G KV heads of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.plans import OpenPlan
from vllm_pyramid.policy.solved import SolvingAllocator
from vllm_pyramid.worker.evict import EvictionUploads, score
from vllm_pyramid.worker.step import StepEvictions
from vllm_pyramid.worker.trace import TraceWriter
from vllm_pyramid.worker.upload import upload
from vllm_pyramid.worker.window_mass import WindowMass, window_mass


class Ranks(Protocol):
    """The tensor-parallel ranks, which have KV heads each and must agree on the lengths."""

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""

    def of_the_first(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values, bit for bit."""


class OneRank:
    """No tensor parallelism."""

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return values

    def of_the_first(self, values: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return values


@dataclass(frozen=True)
class ScoredLayer:
    """A layer that waits: `scores` is `[S, G, columns]`, `evidence` see `SolvingAllocator`.

    `key_cache` and `value_cache` are views `[P, G, N, D]`, `tables` is `[S, M]` int32, unshifted;
    `mass` is there for a trace.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    scores: torch.Tensor
    evidence: torch.Tensor
    mass: WindowMass | None


def _alike(evictions: StepEvictions) -> list[npt.NDArray[np.int64]]:
    """The open prompts in groups of similar length, at most twice as long as one another.

    The scores of a group are padded to its longest prompt and kept until the last layer: beside
    one long prompt, many short ones would cost as much as long ones.
    """
    unsolved = evictions.unsolved
    size = np.ceil(np.log2(evictions.prompt_lens[unsolved]))
    return [unsolved[size == some] for some in np.unique(size)]


class LayerSolver:
    """The layers of a step until the last one has come; one object for all layers of a runner.

    Args:
        policy: with a `solver`. num_layers: L. ranks: that share the KV heads; None for one.
    """

    def __init__(self, policy: Policy, num_layers: int, ranks: Ranks | None = None) -> None:
        assert policy.solver is not None
        self.policy = policy
        self.solver: SolvingAllocator = policy.solver
        self.num_layers = num_layers
        self.ranks = ranks or OneRank()
        self._evictions: StepEvictions | None = None
        self._layers: list[list[ScoredLayer]] = []

    def evict_layer(
        self,
        ops: ModuleType,
        evictions: StepEvictions,
        uploads: EvictionUploads,
        layer: int,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        *,
        scale: float,
        soft_cap: float,
        trace: TraceWriter | None,
    ) -> None:
        """Score a layer; with the last one, solve and evict all. Args: see `evict.evict_layer`."""
        if evictions.unsolved.size == 0:
            return  # only prompts whose lengths are known
        if evictions is not self._evictions:
            self._evictions, self._layers = evictions, []
        assert layer == len(self._layers), f"layer {layer} came after {len(self._layers)} others"
        groups = _alike(evictions)
        waiting = []
        for group in groups:
            device = uploads.get(evictions, group, query.device)
            tables = block_table.index_select(0, device.rows)
            scores, statistics = score(
                ops,
                self.policy,
                device,
                query,
                key_cache,
                tables,
                scale=scale,
                soft_cap=soft_cap,
                max_prompt_len=int(evictions.prompt_lens[group].max()),
                statistics=self.solver.needs_statistics,
            )
            evidence = self.solver.evidence(scores, statistics)
            mass = None
            if trace is not None:
                mass = window_mass(
                    ops, self.policy, evictions, group, device, query, key_cache, tables,
                    scale=scale, soft_cap=soft_cap,
                )  # fmt: skip
            waiting.append(ScoredLayer(key_cache, value_cache, tables, scores, evidence, mass))
        self._layers.append(waiting)
        if layer < self.num_layers - 1:
            return
        layers, self._layers, self._evictions = self._layers, [], None
        for index, group in enumerate(groups):
            of_group = [waiting[index] for waiting in layers]
            self._solve(evictions, group, torch.stack([scored.evidence for scored in of_group]))
            prompt_lens = uploads.get(evictions, group, query.device).prompt_lens
            self._evict(ops, evictions, group, of_group, prompt_lens, trace)

    def _solve(
        self, evictions: StepEvictions, group: npt.NDArray[np.int64], evidence: torch.Tensor
    ) -> None:
        """Settle the open plans of a group of prompts. `evidence` is `[L, S, ...]`."""
        evidence = self.ranks.add_up(evidence)
        measures = []
        for index, request in enumerate(group.tolist()):
            plan = evictions.plans[request]
            assert isinstance(plan, OpenPlan)
            own = evidence[:, index]
            if own.dim() > 1:
                own = own[:, : plan.prompt_len - self.policy.window]
            measured = self.solver.measures(
                own.contiguous(), plan.mean, plan.capacity, self.policy.sinks
            )
            measures.append(measured.double())
        # The one copy to the host: a number a layer and prompt. It waits for the device.
        numbers = self.ranks.of_the_first(torch.stack(measures)).cpu().numpy()
        for request, row in zip(group.tolist(), numbers, strict=True):
            plan = evictions.plans[request]
            assert isinstance(plan, OpenPlan)
            lengths = self.solver.allocate(row, plan.mean, plan.capacity)
            evictions.settle(request, plan.floor + lengths)

    def _evict(
        self,
        ops: ModuleType,
        evictions: StepEvictions,
        unsolved: npt.NDArray[np.int64],
        layers: list[ScoredLayer],
        prompt_lens: torch.Tensor,
        trace: TraceWriter | None,
    ) -> None:
        """Select and compact every layer in which some prompt keeps less than everything."""
        host_lens = evictions.prompt_lens[unsolved]
        host_keeps = np.ascontiguousarray(evictions.helds[:, unsolved])
        keeps = upload(host_keeps, prompt_lens.device)
        for layer, waiting in enumerate(layers):
            given = host_lens - host_keeps[layer]
            if not given.any():
                continue
            max_keep = int(host_keeps[layer].max())
            kept = ops.select(
                waiting.scores,
                prompt_lens,
                keeps[layer],
                window=self.policy.window,
                sinks=self.policy.sinks,
                max_keep=max_keep,
            )
            ops.compact(
                waiting.key_cache,
                waiting.value_cache,
                waiting.tables,
                kept,
                prompt_lens,
                keeps[layer],
                max_keep=max_keep,
            )
            evictions.tokens_done[unsolved] += given
            if trace is not None and waiting.mass is not None:
                recalls = waiting.mass.recall(kept, prompt_lens, keeps[layer])
                for row, index in enumerate(unsolved.tolist()):
                    positions = kept[row, :, : host_keeps[layer, row]]
                    trace.record(evictions, index, layer, positions, recalls[row])
