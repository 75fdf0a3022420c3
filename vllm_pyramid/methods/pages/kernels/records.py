# SPDX-License-Identifier: Apache-2.0
"""Records of page selection: which query tokens choose among which pages, and what they chose.

A page is one block of one layer: page j of a request holds its positions `j * N .. j * N + N - 1`
and lies in block `block_table[r, j]`. Shape legend and cache layout as in the records of all
kernels (`kernels/records.py`); S counts the query tokens that choose, which are called the rows of
a selection.

Summaries lie in a pool `[P, G, width]` under the same block table as K: entry `[b, g]` describes
the keys of KV head g in block b, and lives and moves with the block. Its dtype is float32, or one
of 16 bits: the cache's own dtype holds the maxima and minima of its keys exactly, and bfloat16
those of 8-bit floats.

A row at position p that sees the positions `skip .. p` sees the pages `skip // N .. p // N`. Its
own page `p // N` is always chosen and never scored: it may hold tokens behind p, such as a draft's,
and the choice must not depend on them. Its candidates are the pages before that one, which hold no
token that is not known to the request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

SUMMARY_KINDS = ("box", "spread")
# Rows of D numbers in a summary.
SUMMARY_ROWS = {"box": 2, "spread": 2}
SCORE_KINDS = (*SUMMARY_KINDS, "rows")
COMBINES = ("mean", "max")


@dataclass(frozen=True)
class PageBatch:
    """Query tokens that choose pages, one row for each.

    Attributes:
        query: `[S, H, D]` after the rotary embedding.
        block_table: `[>= R, M]` int32.
        requests: `[S]` int32, each row's row of the block table.
        positions: `[S]` int32, each row's position p.
        skips: `[S]` int32, the first position that each row sees, at most p.
        block_size: N.
        max_pages: the largest number of pages that a row sees; None: the kernel finds it.
        key_scale: factor of all numbers in the key cache, and so of the summaries.
    """

    query: torch.Tensor
    block_table: torch.Tensor
    requests: torch.Tensor
    positions: torch.Tensor
    skips: torch.Tensor
    block_size: int
    max_pages: int | None = None
    key_scale: float = 1.0


@dataclass(frozen=True)
class PageSelection:
    """The pages that each row attends to, as attention takes them.

    An `AttentionBatch` whose requests are the rows, with one query each, takes `block_table`,
    `seq_lens` and `skips` as they are: each KV head then reads its own pages, of which all but the
    last are full.

    Attributes:
        block_table: `[S, G, W]` int32, the blocks of the chosen pages in ascending order; 0 behind
            `counts[s]`.
        pages: `[S, G, W]` int32, the same pages as numbers within the request; -1 behind
            `counts[s]`.
        counts: `[S]` int32, pages of each KV head of a row.
        seq_lens: `[S]` int32, tokens in the list up to the query itself.
        skips: `[S]` int32, the tokens at the start of the first page that the row does not see.
    """

    block_table: torch.Tensor
    pages: torch.Tensor
    counts: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor

    @staticmethod
    def empty(rows: int, kv_heads: int, width: int, device: torch.device) -> PageSelection:

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        lists = (rows, kv_heads, width)
        return PageSelection(make(*lists), make(*lists), make(rows), make(rows), make(rows))

    def of_rows(self, part: slice) -> PageSelection:
        return PageSelection(*(getattr(self, field.name)[part] for field in fields(self)))


@dataclass(frozen=True)
class PageLists:
    """The pages that each row attends to, as attention on a device reads them.

    Entries behind a list keep what they had, and nothing reads them: a step writes as much as its
    rows read, however wide the table is.

    Attributes:
        block_table: `[S, G, W]` int32, the names of the chosen pages in ascending order.
        seq_lens: `[S]` int32, tokens in the list up to the query itself. head_lens: `[S, G]` int32,
            the same number for each KV head.
        skips: `[S]` int32, the tokens at the start of the first page that the row does not see.
        unranked: `[S]` bool, rows that have NaN for a score. miscounted: `[S]` bool, rows whose
            lists have other numbers of pages than their budgets. Kernels set both to true alone.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    head_lens: torch.Tensor
    skips: torch.Tensor
    unranked: torch.Tensor
    miscounted: torch.Tensor

    @staticmethod
    def zeros(rows: int, kv_heads: int, width: int, device: torch.device) -> PageLists:
        """Allocate lists of up to `width` pages, all of them block 0, without a flag."""

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        flags = (make(rows, dtype=torch.bool) for _ in range(2))
        lens = make(rows), make(rows, kv_heads)
        return PageLists(make(rows, kv_heads, width), *lens, make(rows), *flags)

    def of_rows(self, part: slice) -> PageLists:
        return PageLists(*(getattr(self, field.name)[part] for field in fields(self)))
