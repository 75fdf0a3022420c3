# SPDX-License-Identifier: Apache-2.0
"""The lengths of a layer's KV heads, solved from their scores when the layer has attended.

The heads are layers of one head each here (lanes), which `attention/deferred.py` scores and evicts
from. Shape legend: G KV heads of a layer, S prompts that are solved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import DeferredPlan
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.hooks import CacheHooks, EvictionHooks, WorkerContext

# Copies of the scores that wait for the layer's last head: scores, evidence, this of all heads.
_COPIES = 3
# What a choice has of a token and head, at most.
_BYTES_OF_A_CHOICE = 56


class HeadSolver(CacheHooks, EvictionHooks):
    name = "adaptive"

    def __init__(self, policy: Policy, context: WorkerContext) -> None:
        self.policy = policy
        self.together = context.tables_per_layer
        self.allow_device_sync = context.allow_device_sync
        self._context = context

    def bytes_per_block(self) -> int:
        """Return the bytes for a block's part of the scores that wait for the layer's last head.

        Prompts that end have blocks in all layers, of which one waits; padding at most doubles
        scores.
        """
        tokens = max(spec.block_size for spec in self._context.specs)
        return -(-2 * 4 * _COPIES * tokens // self._context.num_layers)

    def bytes_of_buffers(self) -> int:
        """Return the bytes for solving one prompt in a layer, and for the tables that wait."""
        longest = self._context.config.model_config.max_model_len
        rows = self._context.config.scheduler_config.max_num_seqs
        entries = -(-longest // min(spec.block_size for spec in self._context.specs))
        return self.together * (_BYTES_OF_A_CHOICE * longest + 4 * rows * entries)

    def evidence(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of one head; those of sinks, which are not chosen among, as 0."""
        sinks = self.policy.sinks
        if not sinks:
            return scores
        return torch.cat([torch.zeros_like(scores[..., :sinks]), scores[..., sinks:]], dim=-1)

    def decide(
        self, plans: Sequence[DeferredPlan], evidence: torch.Tensor
    ) -> list[npt.NDArray[np.int64] | Exception]:
        found = []
        for index, plan in enumerate(plans):
            context = evidence[:, index, 0, : plan.prompt_len - self.policy.window]
            total = plan.mean * len(context)
            found.append(joint_lengths(context, total, safe=plan.safe, sinks=self.policy.sinks))
        # The layer's only copy to the host: a number a head and prompt.
        with self.allow_device_sync():
            numbers = torch.stack(found).cpu().numpy()
        return [plan.floor + row for plan, row in zip(plans, numbers, strict=True)]


def joint_lengths(scores: torch.Tensor, total: int, *, safe: int, sinks: int = 0) -> torch.Tensor:
    """Count each head's tokens among the `total` best of all heads (AdaKV, arXiv:2407.11550):
    `[G]`.

    Each head's `safe` best tokens come before all others. Among equal scores the lower positions
    come first, and at one position the lower heads: so heads with the same scores keep as many
    tokens, and a head's part is its best tokens by `select`. All numbers are of tokens beyond the
    first `sinks` tokens, which are kept in any case.

    Args:
        scores: `[G, n]` of n context tokens, without NaN and +inf.
        total: G * safe .. G * (n - sinks).
    """
    candidates = scores[:, sinks:]
    if not len(candidates) * safe <= total <= candidates.numel():
        raise RuntimeError(
            f"{total} tokens are to be chosen of {list(candidates.shape)} candidates, {safe} of "
            "each head"
        )
    if safe:
        candidates = candidates.masked_fill(_is_among_best(candidates, safe), torch.inf)
    by_position = candidates.T.reshape(1, -1)
    return _is_among_best(by_position, total).view(-1, len(candidates)).sum(dim=0)


def _is_among_best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return which `count` values of each row are the highest, `[rows, n]` bool; first ones win."""
    if not count:
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = values > least, values == least
    left = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= left))
