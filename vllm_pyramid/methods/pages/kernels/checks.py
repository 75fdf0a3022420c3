# SPDX-License-Identifier: Apache-2.0
"""Checks (ValueError) of page selection that all kernels share, and the memory that they write to.

Those that count pages read back from the device: callers pass the number where they know it.
"""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.pages.kernels.records import (
    COMBINES,
    SCORE_KINDS,
    SUMMARY_KINDS,
    SUMMARY_ROWS,
    PageBatch,
    PageLists,
    PageSelection,
)


def check_summaries(summaries: torch.Tensor, key_cache: torch.Tensor, kind: str) -> None:
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


def check_starts(starts: torch.Tensor, seq_lens: torch.Tensor) -> None:
    wrong = (starts < 0) | (starts > seq_lens)
    if wrong.any():
        r = int(wrong.nonzero()[0])
        raise ValueError(
            f"starts of request {r} is {int(starts[r])}, outside 0 .. seq_lens = {int(seq_lens[r])}"
        )


def check_scoring(
    batch: PageBatch, softmax: Softmax, pool: torch.Tensor, kind: str, combine: str
) -> None:
    """Check that the rows of a batch can be scored against `pool`, without a sliding window."""
    if kind not in SCORE_KINDS or combine not in COMBINES:
        raise ValueError(
            f"kind {kind!r} must be one of {', '.join(SCORE_KINDS)} and combine {combine!r} one "
            f"of {', '.join(COMBINES)}"
        )
    query = batch.query
    rows = SUMMARY_ROWS.get(kind, 1)
    dims = 4 if kind == "rows" else 3
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
    if softmax.sliding_window:
        raise ValueError(
            f"pages are chosen in layers with full attention, got sliding_window "
            f"{softmax.sliding_window}"
        )


def most_visible(batch: PageBatch) -> int:
    if not batch.positions.shape[0]:
        return 1
    wrong = (batch.skips < 0) | (batch.skips > batch.positions)
    if wrong.any():
        s = int(wrong.nonzero()[0])
        raise ValueError(
            f"skips of row {s} is {int(batch.skips[s])}, outside 0 .. positions = "
            f"{int(batch.positions[s])}"
        )
    return int(_visible(batch).max())


def scores_to_fill(batch: PageBatch, kv_heads: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return the memory of scores, `[S, G, W]`: the first rows of `out`, or new memory."""
    rows = batch.query.shape[0]
    most = most_visible(batch) if batch.max_pages is None else batch.max_pages
    columns = max(most, 1) - 1
    if out is None:
        return torch.empty(
            (rows, kv_heads, columns), dtype=torch.float32, device=batch.query.device
        )
    shape = out.shape
    if (
        out.dtype != torch.float32
        or len(shape) != 3
        or not out.is_contiguous()
        or (shape[0] < rows or shape[1] != kv_heads or shape[2] < columns)
    ):
        raise ValueError(
            f"out must be contiguous float32 [>= {rows}, {kv_heads}, >= {columns}], got "
            f"{out.dtype} {list(shape)}"
        )
    return out if shape[0] == rows else out[:rows]


def check_selecting(scores: torch.Tensor, rows: int, sinks: int, recent: int) -> None:
    """Check the scores of a selection, and that the pages it always has include the query's own."""
    if sinks < 0 or recent < 1:
        raise ValueError(
            f"sinks {sinks} must be >= 0 and recent {recent} at least 1: the query's own page is "
            "the last of them"
        )
    if scores.dtype != torch.float32 or scores.dim() != 3 or scores.shape[0] < rows:
        raise ValueError(
            f"scores must be float32 [>= {rows}, G, pages], got {scores.dtype} {list(scores.shape)}"
        )
    if scores.shape[2] > 1 and scores.stride(2) != 1:
        raise ValueError(f"scores must have unit stride in its last dimension, {scores.stride()}")


def selected_counts(
    batch: PageBatch, budgets: torch.Tensor, sinks: int, recent: int
) -> torch.Tensor:
    if (wrong := budgets < 1).any():
        s = int(wrong.nonzero()[0])
        raise ValueError(f"budgets of row {s} is {int(budgets[s])}, not positive")
    always = (batch.skips % batch.block_size > 0).int().clamp(min=sinks) + recent
    return torch.minimum(_visible(batch), torch.maximum(budgets, always))


def most_selected(batch: PageBatch, budgets: torch.Tensor, sinks: int, recent: int) -> int:
    """Return the largest number of pages that a row chooses; 0 without rows."""
    if not batch.positions.shape[0]:
        return 0
    return int(selected_counts(batch, budgets, sinks, recent).max())


def selection_to_fill(rows: int, kv_heads: int, out: PageSelection) -> PageSelection:
    """Check the memory of a selection, and return its first rows."""
    width = out.pages.shape[-1]
    parts = (out.block_table, out.pages, out.counts, out.seq_lens, out.skips)
    exact = True
    for i, part in enumerate(parts):
        shape = part.shape
        fits = len(shape) == (3 if i < 2 else 1) and shape[0] >= rows
        if i < 2:
            fits = fits and shape[1] == kv_heads and shape[2] == width
        if part.dtype != torch.int32 or not fits or not part.is_contiguous():
            raise ValueError(
                f"a selection must be contiguous int32 [>= {rows}, {kv_heads}, {width}] and "
                f"[>= {rows}], got {part.dtype} {list(shape)}"
            )
        exact = exact and shape[0] == rows
    return out if exact else PageSelection(*(part[:rows] for part in parts))


def check_choosing(
    batch: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    scores: torch.Tensor,
    out: PageLists,
    kind: str,
    combine: str,
    sinks: int,
    recent: int,
) -> None:
    """Check what `choose_pages` takes, without a look at the numbers."""
    check_scoring(batch, softmax, pool, kind, combine)
    (rows, heads, _), kv_heads = batch.query.shape, pool.shape[1]
    check_selecting(scores, rows, sinks, recent)
    if batch.max_pages is None or batch.max_pages < 1:
        raise ValueError(f"max_pages must be known, and positive, got {batch.max_pages}")
    if scores.shape[1] != heads or scores.shape[2] < batch.max_pages - 1:
        raise ValueError(
            f"scores must be [>= {rows}, {heads}, >= {batch.max_pages - 1}], got "
            f"{list(scores.shape)}"
        )
    wanted = [(rows, kv_heads, out.block_table.shape[-1]), (rows,), (rows, kv_heads), (rows,)]
    given = [out.block_table, out.seq_lens, out.head_lens, out.skips]
    flags = [out.unranked, out.miscounted]
    if (
        [tuple(one.shape) for one in given + flags] != wanted + [(rows,)] * 2
        or any(one.dtype != torch.int32 for one in given)
        or any(one.dtype != torch.bool for one in flags)
        or not all(one.is_contiguous() for one in (scores, *given, *flags))
    ):
        raise ValueError(
            f"lists of {rows} rows must be contiguous int32 {wanted} and two bool [{rows}], got "
            f"{[(list(one.shape), one.dtype) for one in given + flags]}"
        )


def _visible(batch: PageBatch) -> torch.Tensor:
    return batch.positions // batch.block_size - batch.skips // batch.block_size + 1
