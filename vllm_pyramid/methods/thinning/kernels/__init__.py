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
        (their sum is divided out), and summed over the query heads of a KV head. The context is the
        `contexts[r]` keys right before those queries; earlier keys take part in the softmax, but
        are not reported.

        Args:
            softmax: as in `window_scores`.
            distance_weight: weight of the last query if the first has 1, positive.
            log_sum_exp: as in `window_scores`, for the recent queries.

        Returns:
            `[R, G, max(contexts)]` float32; 0 behind `contexts[r]`.

        Raises:
            ValueError: the batch holds no request.
        """


def recent_ops(ops: Ops) -> RecentOps:
    """Return the kernels of thinning that go with the others."""
    own: RecentOps = ops.of_method(__name__)
    return own
