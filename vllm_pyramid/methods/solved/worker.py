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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import DeferredPlan
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import WorkerHooks, WorkerSide
from vllm_pyramid.step.step import StepEvictions
from vllm_pyramid.step.upload import upload
from vllm_pyramid.step.window_mass import WindowMass, window_mass

if TYPE_CHECKING:
    from vllm_pyramid.methods.solved import SolvingAllocator
    from vllm_pyramid.policy.policy import Policy


@dataclass(frozen=True)
class ScoredLayer:
    """A layer that waits: `scores` is `[S, G, columns]`, `evidence` see `SolvingAllocator`.

    The batch has no queries any more; `mass` is there for a trace.
    """

    batch: EvictionBatch
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


class LayerSolver(WorkerHooks):
    """The layers of a step until the last one has come; one object for all layers of a runner."""

    def __init__(self, policy: Policy, solver: SolvingAllocator, side: WorkerSide) -> None:
        self.policy, self.solver = policy, solver
        self.num_layers, self.ranks = side.num_layers, side.ranks
        self.allow_device_sync = side.allow_device_sync
        self._evictions: StepEvictions | None = None
        self._layers: list[list[ScoredLayer]] = []

    def after_eviction(self, call: AttentionInputs, evictions: StepEvictions) -> None:
        """Score the layer; with the last one, solve and evict all."""
        if evictions.unsolved.size == 0:
            return  # only prompts whose lengths are known
        if evictions is not self._evictions:
            self._evictions, self._layers = evictions, []
        layer = call.layer
        assert layer == len(self._layers), f"layer {layer} came after {len(self._layers)} others"
        groups = _alike(evictions)
        self._layers.append([self._score(call, evictions, group) for group in groups])
        if layer < self.num_layers - 1:
            return
        layers, self._layers, self._evictions = self._layers, [], None
        for index, group in enumerate(groups):
            of_group = [waiting[index] for waiting in layers]
            self._solve(evictions, group, torch.stack([scored.evidence for scored in of_group]))
            self._evict(evictions, group, of_group)

    def _score(
        self, call: AttentionInputs, evictions: StepEvictions, group: npt.NDArray[np.int64]
    ) -> ScoredLayer:
        batch = evictions.batch(call, self.policy, group)
        scores, statistics = self.policy.scorer.scores(
            batch, statistics=self.solver.needs_statistics
        )
        if scores.shape[2] > batch.longest - self.policy.window:  # with columns of the window
            scores = scores[:, :, : batch.longest - self.policy.window]
            columns = torch.arange(scores.shape[2], device=scores.device)
            behind = columns >= (batch.lens - self.policy.window)[:, None]
            scores = scores.masked_fill(behind[:, None], -torch.inf)
        evidence = self.solver.evidence(scores, statistics)
        mass = window_mass(batch) if self.trace is not None else None
        # The queries of all layers together would be as large as the cache.
        no_query = replace(call.batch, query=call.query[:0])
        waiting = replace(batch, call=replace(call, batch=no_query, log_sum_exp=None))
        return ScoredLayer(waiting, scores, evidence, mass)

    def _solve(
        self, evictions: StepEvictions, group: npt.NDArray[np.int64], evidence: torch.Tensor
    ) -> None:
        """Solve the open plans of a group of prompts. `evidence` is `[L, S, ...]`."""
        evidence = self.ranks.all_reduce(evidence)
        plans: list[DeferredPlan] = []
        measures = []
        for index, request in enumerate(group.tolist()):
            plan = evictions.plans[request]
            assert isinstance(plan, DeferredPlan)
            plans.append(plan)
            own = evidence[:, index]
            if own.dim() > 1:
                own = own[:, : plan.prompt_len - self.policy.window]
            measured = self.solver.measures(
                own.contiguous(), plan.mean, plan.capacity, self.policy.sinks, plan.min_mean
            )
            measures.append(measured.double())
        # The one copy to the host: a number a layer and prompt. It waits for the device.
        measured = self.ranks.broadcast(torch.stack(measures))
        with self.allow_device_sync():
            numbers = measured.cpu().numpy()
        for request, plan, row in zip(group.tolist(), plans, numbers, strict=True):
            lengths = self.solver.allocate(row, plan.mean, plan.capacity)
            evictions.resolve(request, plan.floor + lengths)

    def _evict(
        self,
        evictions: StepEvictions,
        group: npt.NDArray[np.int64],
        layers: list[ScoredLayer],
    ) -> None:
        """Select and compact every layer in which some prompt keeps less than everything."""
        host_keeps = np.ascontiguousarray(evictions.kept_lens[:, group])
        keeps = upload(host_keeps, layers[0].scores.device)
        for layer, waiting in enumerate(layers):
            evictions.copy_blocks(waiting.batch.call, group.tolist())
            batch = replace(waiting.batch, keeps=keeps[layer], host_keeps=host_keeps[layer])
            if (batch.host_keeps < batch.host_lens).any():
                batch.shorten(waiting.scores, self.trace, waiting.mass)
