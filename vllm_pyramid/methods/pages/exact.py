# SPDX-License-Identifier: Apache-2.0
"""Score a page by all of its keys: what summaries are measured against."""

from __future__ import annotations

from typing import ClassVar, Literal

from vllm_pyramid.policy.page_scorer import PageScorer


class ExactScorer(PageScorer):
    """Read the pages that hold the keys with the largest products, which takes all of K to find.

    It keeps no summaries and saves little time: it shows what a page scorer could reach at most.
    """

    kind: Literal["exact"] = "exact"
    rows: ClassVar[int] = 0
    score_kind: ClassVar[str] = "exact"

    @classmethod
    def check_class(cls) -> None:
        """Accept the class: the kernel reads the keys themselves."""
