# SPDX-License-Identifier: Apache-2.0
"""What a page scorer keeps of each page, next to the cache.

Shape legend: P blocks, G KV heads, r rows of a summary, D head size, B blocks of a call,
R requests, S rows of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_pyramid.methods.pages.kernels import page_ops
from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages.choosing import Filling
    from vllm_pyramid.step.attention_inputs import AttentionInputs
    from vllm_pyramid.step.eviction_batch import EvictionBatch


class Summaries:
    """The summaries of the pages of all layers: `rows` `[P, G, r * D]`, of one layer at a time.

    Entries of pages that are not full yet hold anything; nothing reads them.
    """

    def __init__(
        self, scorer: PageScorer, num_kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> None:
        self._scorer = scorer
        self._shape = num_kv_heads, scorer.rows * head_size
        self._head_size = head_size
        # A cache of 8 bits has numbers that bfloat16 holds exactly.
        self._dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        self.rows = torch.empty(0)

    def allocate(self, num_blocks: int, device: torch.device) -> None:
        self.rows = torch.empty(0)  # two generations never exist together
        with torch.inference_mode(False):
            self.rows = torch.zeros(num_blocks, *self._shape, dtype=self._dtype, device=device)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.rows[targets] = self.rows[sources]

    def multiplied(self) -> torch.Tensor:
        """Return what queries are multiplied with, in the shape that the scorer's kernel reads."""
        if self._scorer.score_kind == "rows":
            return self.rows.unsqueeze(2)
        return self.rows

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries, `[S, heads, D]`, as they are multiplied with the rows of a summary.

        ValueError: the scorer's own `extend` returned another shape, another type or NaN.
        """
        if self._scorer.has_kernels:
            return query
        found = self._scorer.extend(query.float())
        shape = *query.shape[:2], self._scorer.rows * self._head_size
        check_result(self._scorer, "extend", found, shape)
        return found

    def add_filled(self, inputs: AttentionInputs, filled: Filling) -> None:
        """Summarise the pages that a step fills; errors as of `extend`."""
        table, pages = inputs.block_table, filled.pages
        if self._scorer.summary_kind is not None:
            starts, ends = filled.starts[inputs.layer], filled.ends[inputs.layer]
            skips = inputs.batch.skips[: len(pages.starts)]
            self._add_ranges(inputs, table, starts, ends, skips, filled.max_pages)
        else:
            blocks = table[torch.from_numpy(pages.requests), torch.from_numpy(pages.pages)]
            self._add_blocks(inputs, blocks.long())

    def add_survivors(self, batch: EvictionBatch, block_size: int) -> None:
        """Summarise the pages of what an eviction has kept, which hold other keys now."""
        starts, ends = batch.lens - batch.keeps, batch.lens
        if self._scorer.summary_kind is not None:
            first = (batch.host_lens - batch.host_keeps) // block_size
            most = int((-(-batch.host_lens // block_size) - first).max())
            self._add_ranges(batch.call, batch.tables, starts, ends, starts, most)
            return
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            # The last page may not be full; then it is summarised again when it is.
            blocks = batch.tables[row, start // block_size : end // block_size]
            self._add_blocks(batch.call, blocks.long())

    def _add_ranges(
        self,
        inputs: AttentionInputs,
        table: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        skips: torch.Tensor,
        max_pages: int,
    ) -> None:
        """Summarise the full pages of the tokens from `starts` to `ends`, `[R]`, by the kernel."""
        assert self._scorer.summary_kind is not None, "the scorer has a kernel"
        page_ops(inputs.ops).summarise_pages(
            self.rows,
            inputs.key_cache,
            table,
            starts,
            ends,
            skips,
            kind=self._scorer.summary_kind,
            max_pages=max_pages,
        )

    def _add_blocks(self, inputs: AttentionInputs, blocks: torch.Tensor) -> None:
        """Call the scorer's own `summarise` for blocks, `[B]`."""
        if not len(blocks):
            return
        found = self._scorer.summarise(inputs.key_cache[blocks].float())
        check_result(self._scorer, "summarise", found, (len(blocks), *self._shape))
        self.rows[blocks] = found.to(self._dtype)


def try_scorer(
    scorer: PageScorer, heads: int, kv_heads: int, head_size: int, page_size: int
) -> None:
    """Call a user's page scorer once with made-up keys and queries; ValueError: it is wrong."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, kv_heads, page_size, head_size, generator=generator)
    query = torch.randn(2, heads, head_size, generator=generator)
    width = scorer.rows * head_size
    for name, given, shape in (
        ("summarise", keys, (3, kv_heads, width)),
        ("extend", query, (2, heads, width)),
    ):
        if name == "extend" and scorer.has_kernels:
            continue
        try:
            found = getattr(scorer, name)(given)
        except Exception as error:
            raise ValueError(
                f"`{name}` of the page scorer {scorer.kind!r} failed on made-up input: "
                f"{type(error).__name__}: {error}"
            ) from error
        check_result(scorer, name, found, shape)


def check_result(scorer: PageScorer, name: str, found: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a function of a page scorer has returned finite float32 numbers."""
    what = f"a {type(found).__name__}"
    if isinstance(found, torch.Tensor):
        if found.dtype == torch.float32 and tuple(found.shape) == shape and found.isfinite().all():
            return
        what = f"{list(found.shape)} of {found.dtype}"
    raise ValueError(
        f"`{name}` of the page scorer {scorer.kind!r} must return {list(shape)} finite numbers of "
        f"torch.float32, not {what}"
    )
