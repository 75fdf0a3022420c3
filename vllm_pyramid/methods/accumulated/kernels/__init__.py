# SPDX-License-Identifier: Apache-2.0
"""The kernels of accumulated attention, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax

MASS_KINDS = ("sum", "below_average")


class MassOps(Protocol):
    """The kernel of one device type that accumulates attention; the rules are those of `Ops`."""

    def add_key_mass(
        self,
        mass: torch.Tensor,
        batch: AttentionBatch,
        softmax: Softmax,
        *,
        kind: str = "sum",
        first_queries: torch.Tensor | None = None,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """Add to each visible key what the queries of a step give it, over all its query heads.

        The softmax of `paged_attention` is computed again, without V. With `kind="sum"` its
        probabilities are added up (H2O, arXiv:2306.14048). With `kind="below_average"` a key counts
        1 for every query that gives it less than 1 / (the number of keys which that query sees)
        (Scissorhands, arXiv:2305.17118). A query that sees no key adds nothing.

        Args:
            mass: `[P, G, N]` float32, written; unit stride in N, one block for each of the cache.
                Only the slots of visible keys are touched.
            kind: one of `MASS_KINDS`.
            first_queries: `[R]` int32; queries at positions below it add nothing. None: all add.
            log_sum_exp: `[T, H]` float32 as `paged_attention` wrote it for the same batch. It saves
                the first of two passes over K; weights then share a factor near 1, by its rounding.

        Raises:
            ValueError: `mass` or `log_sum_exp` has another shape or dtype, or `kind` is unknown.
        """


def mass_ops(ops: Ops) -> MassOps:
    return ops.of_method(__name__)
