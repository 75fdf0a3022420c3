# SPDX-License-Identifier: Apache-2.0
"""Score a page by the mean of its keys (TriForce's retrieval, ShadowKV's landmarks)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    import torch


class MeanScorer(PageScorer):
    """Read the pages whose mean key has the largest product with the query.

    The retrieval of TriForce (arXiv:2404.11912, section 4.1) and the landmarks of ShadowKV
    (arXiv:2410.21465, section 4).
    """

    kind: Literal["mean"] = "mean"
    rows: ClassVar[int] = 1
    summary_kind: ClassVar[str | None] = "mean"
    score_kind: ClassVar[str] = "mean"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.mean(dim=2)

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        return query
