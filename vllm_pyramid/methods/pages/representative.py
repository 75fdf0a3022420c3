# SPDX-License-Identifier: Apache-2.0
"""Score a page by the keys that its own queries ask for most (InfLLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    import torch


class RepresentativeScorer(PageScorer):
    """InfLLM: some keys stand for a page, those with the largest products with nearby queries.

    InfLLM rates a key by the mean product with the queries of the tokens that follow it, and a
    block by the sum of the query's products with its `count` best keys (arXiv:2402.04617, section
    3.2). Here the nearby queries are those of the page's own tokens, averaged over the query heads
    of the KV head: what represents a page is then known when it is full, and is the same for all
    requests that share the page, whatever follows it.

    Attributes:
        count: keys that stand for a page.
        reduce: how the query's products with them are combined.
    """

    kind: Literal["representative"] = "representative"
    count: int = Field(default=4, ge=1, le=64)
    reduce: Literal["sum", "max"] = "sum"

    needs_queries: ClassVar[bool] = True

    @property
    def summary_rows(self) -> int:
        """The mean of the keys, whose product is the sum but for a factor; or all of them."""
        return 1 if self.reduce == "sum" else self.count

    @property
    def products(self) -> int:
        """Return one product with the mean; or with each key, of which the largest counts."""
        return self.summary_rows

    @property
    def has_kernels(self) -> bool:
        """Return True: the query needs no extension."""
        return True

    @classmethod
    def check_class(cls) -> None:
        """Accept the class: its summaries have as many rows as it says."""

    def represent(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the summaries of pages: `[B, G, rows * D]` float32.

        `keys` are `[B, G, N, D]` float32, `queries` `[B, G, D]` float32, the means of their tokens.
        """
        count = min(self.count, keys.shape[2])
        scores = (keys @ queries[..., None])[..., 0]
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        found = keys.gather(
            2, best.sort(dim=-1).values[..., None].expand(-1, -1, -1, keys.shape[3])
        )
        if self.reduce == "sum":
            return found.mean(dim=2)
        if count < self.count:  # pages of fewer tokens: the last one is repeated
            found = found[:, :, [*range(count), *[count - 1] * (self.count - count)]]
        return found.flatten(2)
