# SPDX-License-Identifier: Apache-2.0
"""Records of page selection: which query tokens choose among which pages, and what they chose.

A page is one block of one layer: page j of a request holds its positions `j * N .. j * N + N - 1`
and lies in block `block_table[r, j]`. Shape legend and cache layout as in `records.py`; S counts
the query tokens that choose, which are called the rows of a selection.

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

from dataclasses import dataclass

import torch

SUMMARY_KINDS = ("mean", "box", "spread")
# Rows of D numbers in a summary.
SUMMARY_ROWS = {"mean": 1, "box": 2, "spread": 2}
SCORE_KINDS = (*SUMMARY_KINDS, "exact", "rows")
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
        """Allocate a selection of up to `width` pages a row, for `select_pages` to fill."""

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        lists = (rows, kv_heads, width)
        return PageSelection(make(*lists), make(*lists), make(rows), make(rows), make(rows))


def check_summaries(summaries: torch.Tensor, key_cache: torch.Tensor, kind: str) -> None:
    """Raise ValueError unless `summaries` is a pool of this kind for the cache."""
    if kind not in SUMMARY_KINDS:
        raise ValueError(f"kind {kind!r} must be one of {', '.join(SUMMARY_KINDS)}")
    blocks, heads, _, head_size = key_cache.shape
    shape = (blocks, heads, SUMMARY_ROWS[kind] * head_size)
    if summaries.shape != shape or summaries.stride(2) != 1:
        raise ValueError(
            f"summaries of kind {kind} must be {list(shape)} with unit stride in the last "
            f"dimension, got {list(summaries.shape)}, strides {summaries.stride()}"
        )
    if summaries.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"summaries must be float32, bfloat16 or float16, got {summaries.dtype}")


def check_pool(batch: PageBatch, pool: torch.Tensor, kind: str, combine: str) -> None:
    """Raise ValueError unless the rows of a batch can be scored against `pool`."""
    if kind not in SCORE_KINDS or combine not in COMBINES:
        raise ValueError(
            f"kind {kind!r} must be one of {', '.join(SCORE_KINDS)} and combine {combine!r} one "
            f"of {', '.join(COMBINES)}"
        )
    query = batch.query
    rows = SUMMARY_ROWS.get(kind, 1)
    dims = 4 if kind in ("exact", "rows") else 3
    if (
        query.dim() != 3
        or pool.dim() != dims
        or pool.shape[-1] != rows * query.shape[2]
        or query.shape[1] % pool.shape[1]
        or pool.stride(-1) != 1
    ):
        wanted = f"[P, G, {'n, ' if dims == 4 else ''}{f'{rows} * ' if rows > 1 else ''}D]"
        raise ValueError(
            f"kind {kind} scores a query [S, a multiple of G, D] against a pool {wanted} with unit "
            f"stride in its last dimension, got {list(query.shape)} and {list(pool.shape)}, "
            f"strides {pool.stride()}"
        )
    if kind == "exact" and pool.shape[2] != batch.block_size:
        raise ValueError(
            f"kind exact takes the key cache, with pages of {batch.block_size} tokens, got "
            f"{list(pool.shape)}"
        )


def check_page_counts(sinks: int, recent: int) -> None:
    """Raise ValueError unless the pages that are chosen in any case include the query's own."""
    if sinks < 0 or recent < 1:
        raise ValueError(
            f"sinks {sinks} must be >= 0 and recent {recent} at least 1: the query's own page is "
            "the last of them"
        )
