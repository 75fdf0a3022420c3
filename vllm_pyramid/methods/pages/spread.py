# SPDX-License-Identifier: Apache-2.0
"""Score a page by the mean of its keys and how far they spread."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    import torch


class SpreadScorer(PageScorer):
    """Read the pages whose keys lie towards the query on average, or spread that way.

    The summary is the mean and the standard deviation of the page's keys in each channel; the
    product is q . mean + |q| . deviation. It finds single tokens that a mean hides, and is not
    misled by channels whose extremes come from different keys, as a box is.
    """

    kind: Literal["spread"] = "spread"
    rows: ClassVar[int] = 2
    summary_kind: ClassVar[str | None] = "spread"
    score_kind: ClassVar[str] = "spread"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([keys.mean(dim=2), keys.std(dim=2, correction=0)], dim=-1)

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([query, query.abs()], dim=-1)
