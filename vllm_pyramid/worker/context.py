# SPDX-License-Identifier: Apache-2.0
"""What a layer's metadata builder and attention share: given to both by the model runner."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from vllm_pyramid.policy.schedules import ThinGeneratedSchedule
from vllm_pyramid.worker.evict import EvictionUploads, evict_layer
from vllm_pyramid.worker.key_mass import KeyMass
from vllm_pyramid.worker.retention import Retention
from vllm_pyramid.worker.shifted import ShiftedTables
from vllm_pyramid.worker.solve import LayerSolver
from vllm_pyramid.worker.step import StepEvictions
from vllm_pyramid.worker.thinner import Thinner
from vllm_pyramid.worker.thinning import StepThinning
from vllm_pyramid.worker.trace import TraceWriter
from vllm_pyramid.worker.upload import upload


@dataclass
class LayerContext:
    """One attention layer's place in the policy.

    Attributes:
        retention: the runner's, shared by all layers. layer: index of this one, from the bottom.
        uploads: the step's evictions on the device, shared by all layers.
        solver: for policies that solve the lengths from all layers' scores, else None; shared too.
        thinner: for policies that thin prompts between layers, else None; shared too.
        trace: where kept positions go, or None; set when the worker's warm-up is over.
        shifted: short tables of all layers, on devices whose kernels need them.
        mass: for policies that accumulate what queries give keys, else None; shared by all layers.
        host_values: V of a layer of which the device holds K alone, `[P, G, N, D]` in host memory.
        renormalize: of the policy, see `Policy`.
    """

    retention: Retention
    layer: int
    uploads: EvictionUploads
    solver: LayerSolver | None = None
    thinner: Thinner | None = None
    trace: TraceWriter | None = None
    shifted: ShiftedTables | None = None
    mass: KeyMass | None = None
    host_values: torch.Tensor | None = None
    renormalize: bool = False

    @property
    def thinning(self) -> StepThinning | None:
        """The step's prompts that are thinned between layers, if there are any."""
        return self.retention.step.thinning

    def evict(
        self,
        ops: ModuleType,
        evictions: StepEvictions,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        *,
        scale: float,
        soft_cap: float,
    ) -> None:
        """Evict in this layer (see `evict_layer`).

        Prompts whose lengths are solved wait for the last layer, and then give in all of them.
        """
        if isinstance(self.retention.policy.schedule, ThinGeneratedSchedule):
            self._settle_groups(self.retention.policy.schedule, evictions, block_table)
        evict_layer(
            ops,
            self.retention.policy,
            evictions,
            self.uploads,
            self.layer,
            query,
            key_cache,
            value_cache,
            block_table,
            scale=scale,
            soft_cap=soft_cap,
            trace=self.trace,
            mass=self.mass,
            shifted=self.shifted is not None,
        )
        if self.mass is not None and self.mass.scorer.starts_over:
            everyone = np.arange(len(evictions.request_ids))
            device = self.uploads.get(evictions, everyone, query.device)
            tables = device.tables(block_table, self.layer, self.shifted is not None)
            self.mass.start_over(tables, device.lens[self.layer])
        if self.solver is not None:
            self.solver.evict_layer(
                ops,
                evictions,
                self.uploads,
                self.layer,
                query,
                key_cache,
                value_cache,
                block_table,
                scale=scale,
                soft_cap=soft_cap,
                trace=self.trace,
            )

    def _settle_groups(
        self, schedule: ThinGeneratedSchedule, evictions: StepEvictions, block_table: torch.Tensor
    ) -> None:
        """Of every request past its prompt the group of generated tokens that leaves the window."""
        assert self.mass is not None
        past = np.array([i for i, number in enumerate(evictions.numbers) if number > 1], np.int64)
        if not past.size:
            return
        groups = np.array(evictions.numbers)[past] - 1 - schedule.gen_window // schedule.every
        num_layers = self.retention.num_layers
        winners = [
            schedule.kept_of_group(group, num_layers)[self.layer] if group > 0 else -1
            for group in groups.tolist()
        ]
        device = self.uploads.get(evictions, past, block_table.device)
        self.mass.settle_group(
            device.tables(block_table, self.layer, self.shifted is not None),
            device.lens[self.layer],
            upload(np.array(winners, np.int32), block_table.device),
            tokens=schedule.every,
            window=schedule.gen_window,
        )
