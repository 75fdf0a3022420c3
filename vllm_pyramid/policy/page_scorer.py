# SPDX-License-Identifier: Apache-2.0
"""The contract of a page scorer: it says how much of a query's attention a page may get.

A scorer makes a summary of a page's keys when its tokens are written. Behind the prompt each query
is multiplied with the summaries; the pages with the largest results are read.

Shape legend: B pages, N tokens of a page, G KV heads, D head size, S queries, H query heads, r rows
of a summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_pyramid.policy.capabilities import Declared, Feature
from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    import torch


class PageScorer(Component):
    """Base class of page scorers: `summarise` and `extend`, whose product is a page's logit.

    A softmax over the pages that a query sees makes weights of the logits, in each query head; they
    are combined over the query heads of a KV head, and the largest sums win.

    Class attributes:
        rows: r, the summary's rows of D numbers: 1 or 2.
        summary_kind: the kernel that makes the summaries (`methods/pages/kernels/`), of which
            `summarise` is then the reference; None: `summarise` is called.
        score_kind: the kernel that scores them. `rows` multiplies with what `extend` returns.
    """

    section: ClassVar[str] = "attend.scorer"
    rows: ClassVar[int] = 1
    summary_kind: ClassVar[str | None] = None
    score_kind: ClassVar[str] = "rows"

    @property
    def unsupported(self) -> Declared:
        found = Declared()
        if ":" in self.kind:
            found[Feature.HOST_FOLDER] = (
                "files hold its summaries, and its code may be another after a restart"
            )
        if not self.has_kernels:
            found[Feature.CUDA] = (
                "it runs in PyTorch and would wait for the device in each step",
                "choose attend.scorer spread or box, or serve on a CPU",
            )
        return found

    @property
    def has_kernels(self) -> bool:
        """Whether kernels do what `summarise` and `extend` say."""
        return self.summary_kind is not None

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the summaries of pages, `[B, G, r * D]` float32, a function of the page's keys
        alone.

        `keys` are `[B, G, N, D]` float32, with the rotary embedding applied. Pages that are not
        full yet hold anything behind their last token; their summaries are not used.
        """
        raise NotImplementedError

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        """Return what queries multiply summaries with: `[S, H, r * D]` float32.

        The layer's softmax scale is applied to the product. `query` is `[S, H, D]` float32, with
        the rotary embedding applied.
        """
        raise NotImplementedError

    @classmethod
    def check_class(cls) -> None:
        for name in ("summarise", "extend"):
            if getattr(cls, name) is getattr(PageScorer, name):
                raise ValueError(
                    f"the page scorer {cls.__module__}:{cls.__qualname__} has no method `{name}`"
                )
        if cls.rows not in (1, 2):
            raise ValueError(
                f"the page scorer {cls.__module__}:{cls.__qualname__} has {cls.rows} rows in a "
                "summary, and kernels read 1 or 2"
            )
