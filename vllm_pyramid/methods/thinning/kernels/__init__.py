# SPDX-License-Identifier: Apache-2.0
"""The kernels of thinning, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import Softmax


@dataclass(frozen=True)
class RecentBatch:
    """The recent queries of requests, and the keys right before them (the context).

    Attributes:
        query: `[T, H, D]` queries of this step.
        query_ends: `[R]` int32; the recent queries of r are the rows `query_ends[r] - recents[r] ..
            query_ends[r] - 1` of `query`, and belong to its last tokens.
        key_cache, block_table, seq_lens, skips, key_scale: as in `AttentionBatch`; `key_scales`
            too, but not in C++.
        recents: `[R]` int32, the number of recent queries, at least 1.
        contexts: `[R]` int32, the number of keys reported, at the positions `seq_lens[r] -
            recents[r] - contexts[r] .. seq_lens[r] - recents[r] - 1`.
        max_context: max(contexts), which sets the width of the result. max_recent: max(recents).
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor
    recents: torch.Tensor
    contexts: torch.Tensor
    max_context: int | None = None
    key_scale: float = 1.0
    max_recent: int | None = None
    key_scales: torch.Tensor | None = None


class RecentOps(Protocol):
    """The kernel of one device type that scores pieces; the rules are those of `Ops`."""

    def recent_mass(
        self,
        batch: RecentBatch,
        softmax: Softmax,
        *,
        distance_weight: float,
        log_sum_exp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum the attention that recent queries pay to their context (PyramidInfer, section 4.1).

        For each request, the causal softmax over all visible keys (and the head's sink) is averaged
        over the last `recents[r]` queries, whose weights rise linearly from 1 to `distance_weight`
        (positive; their sum is divided out), and summed over the query heads of a KV head. Reported
        are the `contexts[r]` keys right before those queries: `[R, G, max(contexts)]` float32, 0
        behind `contexts[r]`. `softmax` and `log_sum_exp` are as in `window_scores`. ValueError: the
        batch holds no request.
        """


def recent_ops(ops: Ops) -> RecentOps:
    return ops.of_method(__name__)
