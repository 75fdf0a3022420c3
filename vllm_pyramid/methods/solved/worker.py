# SPDX-License-Identifier: Apache-2.0
"""The lengths of a prompt's layers, solved from what the scores of all of them say.

`attention/deferred.py` scores each layer and evicts. Shape legend: L layers, S prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import DeferredPlan
from vllm_pyramid.step.hooks import CacheHooks, EvictionHooks, WorkerContext

if TYPE_CHECKING:
    from vllm_pyramid.methods.solved import SolvingAllocator
    from vllm_pyramid.policy.policy import Policy


# What `measures` keeps of a token in a layer: its share, sorted and summed, in eight bytes each.
_BYTES_OF_A_SHARE = 72


class LayerSolver(CacheHooks, EvictionHooks):
    name = "solved"
    asks_ranks: ClassVar[bool] = True

    def __init__(self, policy: Policy, solver: SolvingAllocator, context: WorkerContext) -> None:
        self.policy, self.solver = policy, solver
        self.ranks, self.allow_device_sync = context.ranks, context.allow_device_sync
        self._context = context

    def bytes_per_block(self) -> int:
        """Return the bytes for a block's scores, which wait for the step's last layer."""
        tokens = max(spec.block_size for spec in self._context.specs)
        numbers = max(spec.num_kv_heads * spec.block_size for spec in self._context.specs)
        # Padding may double them. Evidence is kept by layer, and once more for all layers.
        return 2 * 4 * (numbers + 2 * tokens * self.solver.sees_tokens)

    def bytes_of_buffers(self) -> int:
        """Return the bytes for solving one prompt, and for the tables that wait, in all layers."""
        longest = self._context.config.model_config.max_model_len
        rows = self._context.config.scheduler_config.max_num_seqs
        entries = -(-longest // min(spec.block_size for spec in self._context.specs))
        solving = _BYTES_OF_A_SHARE * longest * self.solver.sees_tokens
        return self._context.num_layers * (solving + 4 * rows * entries)

    def evidence(self, scores: torch.Tensor) -> torch.Tensor:
        return self.solver.evidence(scores)

    def decide(
        self, plans: Sequence[DeferredPlan], evidence: torch.Tensor
    ) -> list[npt.NDArray[np.int64] | Exception]:
        evidence = self.ranks.all_reduce(evidence)
        errors: dict[int, Exception] = {}
        measures = []
        for index, plan in enumerate(plans):
            own = evidence[:, index]
            if own.dim() > 1:
                own = own[:, : plan.prompt_len - self.policy.window]
            try:
                measured = self.solver.measures(
                    own.contiguous(), plan.mean, plan.capacity, self.policy.sinks, plan.min_mean
                )
                measures.append(measured.to(evidence.device, torch.double).reshape(len(evidence)))
            except Exception as error:
                errors[index] = error
                # Whatever a rank has found, it takes the first one's numbers, which say so.
                nothing = torch.full_like(evidence[:, index], torch.nan, dtype=torch.double)
                measures.append(nothing.reshape(len(evidence), -1)[:, 0])
        # The one copy to the host: a number a layer and prompt. It waits for the device.
        measured = self.ranks.broadcast(torch.stack(measures))
        with self.allow_device_sync():
            numbers = measured.cpu().numpy()
        return [
            self._lengths(plan, row, errors.get(index))
            for index, (plan, row) in enumerate(zip(plans, numbers, strict=True))
        ]

    def _lengths(
        self, plan: DeferredPlan, measured: npt.NDArray[np.float64], error: Exception | None
    ) -> npt.NDArray[np.int64] | Exception:
        """Return what each layer keeps of a prompt, or why that could not be solved."""
        if np.isnan(measured).any():
            return error or ValueError("what was measured of its scores is NaN")
        try:
            return plan.floor + self.solver.allocate(measured, plan.mean, plan.capacity)
        except Exception as failed:
            return failed
