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


# The functions below find lengths without reading anything back, and each looks at one request
# alone, so a result does not depend on the batch. L layers, n context tokens (those before the
# observation window); `scores[l, i]` is the score w_l of context token i in layer l (XKV's Eq. 3),
# not negative; a positive factor of a layer does not change the result. The first `sinks` tokens
# are kept in any case and are not candidates, but their score counts as kept.

# Sums of shares differ from their exact value by rounding: a goal is reached if less is missing.
ROUNDING = 1e-9


def shares_of(scores: torch.Tensor) -> torch.Tensor:
    """Return each token's share of its layer's score, `w_l / sum(w_l)`: `[L, n]` float64.

    A layer whose scores are all 0 has shares of 0. NaN and infinity count as 0, so that a request
    whose keys overflowed gets some lengths.
    """
    exact = scores.double().nan_to_num(nan=0.0, posinf=0.0)
    total = exact.sum(dim=-1, keepdim=True)
    return exact / torch.where(total > 0, total, 1.0)


def best_lengths(scores: torch.Tensor, total: int, *, sinks: int = 0) -> torch.Tensor:
    """Find the lengths with the greatest mean R for a given total (XKV's Eq. 17): `[L]` int64.

    The paper's Algorithm 1 takes one token a step, always the largest share of any layer that is
    not taken yet, so the result is the top `total` of all shares together, lower layers first.
    Lengths and `total`, 0 .. L * (n - sinks), are of tokens beyond the sinks.
    """
    candidates = shares_of(scores)[:, sinks:].contiguous()
    if not 0 <= total <= candidates.numel():
        raise RuntimeError(
            f"{total} tokens are to be chosen of {list(candidates.shape)} candidates"
        )
    if total == 0:
        return torch.zeros(len(candidates), dtype=torch.int64, device=scores.device)
    threshold = candidates.flatten().topk(total, sorted=False).values.min()
    return _split_at(candidates, threshold, total)


def least_lengths(
    scores: torch.Tensor, goal: float, *, limit: int, at_least: int = 0, sinks: int = 0
) -> torch.Tensor:
    """Find the lengths of the least total whose mean R is at least `goal` (XKV's Eq. 18): `[L]`.

    The cumulative sums of the sorted shares give the mean R of every total. The total of all layers
    beyond the sinks is at most `limit` and at least `at_least`, whatever the goal.
    """
    shares = shares_of(scores)
    candidates = shares[:, sinks:].contiguous()
    if not 0 <= at_least <= limit <= candidates.numel():
        raise RuntimeError(
            f"{at_least} to {limit} tokens are to be chosen of {list(candidates.shape)} candidates"
        )
    if limit == 0:
        return torch.zeros(len(candidates), dtype=torch.int64, device=scores.device)
    kept_anyway = torch.where(shares.sum(dim=-1) > 0, shares[:, :sinks].sum(dim=-1), 1.0).sum()
    descending = candidates.flatten().sort(descending=True).values[:limit]
    reached = kept_anyway + torch.cat([descending.new_zeros(1), descending.cumsum(dim=0)])
    # reached[N] is L times the mean R of N tokens.
    total = (reached < goal * len(candidates) - ROUNDING).sum().clamp(at_least, limit)
    # An index without dimensions would be read back to the host.
    threshold = descending.gather(0, (total - 1).clamp(min=0)[None])[0]
    return torch.where(total > 0, _split_at(candidates, threshold, total), 0)


def _split_at(
    candidates: torch.Tensor, threshold: torch.Tensor, total: int | torch.Tensor
) -> torch.Tensor:
    """Count each layer's part of `total` tokens: all above the threshold, then equal ones."""
    above = (candidates > threshold).sum(dim=-1)
    equal = (candidates == threshold).sum(dim=-1)
    left = total - above.sum()
    before = equal.cumsum(dim=0) - equal
    return above + torch.minimum((left - before).clamp(min=0), equal)


def sum_of_heads(values: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1, one head after the other: `[S, G, ...]` to `[S, ...]`.

    The order is fixed, unlike that of `Tensor.sum`, so lengths do not depend on the batch.
    """
    total = values[:, 0].clone()
    for head in range(1, values.shape[1]):
        total += values[:, head]
    return total
