# SPDX-License-Identifier: Apache-2.0
"""Score a page by the largest product that a key in its bounding box can have (Quest)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    import torch


class BoxScorer(PageScorer):
    """Quest: read the pages whose keys may have the largest product with the query.

    The summary is the greatest and the least number of the page's keys in each channel; their
    product with the query's positive and negative part is never below that of any key of the page
    (arXiv:2406.10774, section 3.3 and algorithm 1; ArkVale has the same bound, in host memory).
    """

    kind: Literal["box"] = "box"
    rows: ClassVar[int] = 2
    summary_kind: ClassVar[str | None] = "box"
    score_kind: ClassVar[str] = "box"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([keys.amax(dim=2), keys.amin(dim=2)], dim=-1)

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
