# SPDX-License-Identifier: Apache-2.0
"""The contract of the kernel that scores pieces, beside `kernels/contract.py`."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.thinning.kernels.records import RecentBatch


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
