# SPDX-License-Identifier: Apache-2.0
"""Launchers of the C++ kernels that choose pages: a part of `functions.py`."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu.checks import (
    DTYPE_CODES,
    MAX_HEAD_SIZE,
    cache_code,
    check_cache,
    check_head_size,
    check_scale,
    dtype_code,
    sinks_and_code,
    table_stride,
    vector_address,
)
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import PyrPageScores, PyrPageSelect, PyrSummaries, packer
from vllm_pyramid.kernels.page_records import (
    COMBINES,
    SCORE_KINDS,
    SUMMARY_KINDS,
    SUMMARY_ROWS,
    PageBatch,
    PageSelection,
    check_page_counts,
    check_pool,
    check_summaries,
)
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.kernels.reference_pages import check_no_window

_pack_summaries = packer(PyrSummaries)
_pack_scores = packer(PyrPageScores)
_pack_select = packer(PyrPageSelect)


def summarise_pages(
    summaries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    kind: str,
    max_pages: int | None = None,
) -> None:
    """Summarise with one thread for each page; `max_pages` is not used."""
    del max_pages
    strides = check_cache("key_cache", key_cache)
    check_summaries(summaries, key_cache, kind)
    blocks, heads, block_size, head_size = key_cache.shape
    check_head_size(head_size)
    requests = seq_lens.shape[0]
    record = _pack_summaries(
        summaries.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        vector_address("starts", starts, requests),
        vector_address("seq_lens", seq_lens, requests),
        vector_address("skips", skips, requests),
        *(SUMMARY_KINDS.index(kind), cache_code(key_cache), DTYPE_CODES[summaries.dtype]),
        *(heads, head_size, block_size, blocks, requests, block_table.shape[1]),
        *strides,
        *summaries.stride()[:2],
        *(table_stride(block_table, requests), torch.get_num_threads()),
    )
    run("summarise_pages", record)


def score_pages(
    batch: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    *,
    kind: str,
    combine: str = "mean",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score with one thread for each row and KV head.

    A row's scores have the same bits in every batch and on every number of threads.
    """
    check_pool(batch, pool, kind, combine)
    check_no_window(softmax)
    check_scale("key_scale", batch.key_scale)
    if not softmax.scale > 0:
        raise ValueError(f"scale must be positive, got {softmax.scale}")
    query = batch.query
    rows, heads, head_size = query.shape
    width = SUMMARY_ROWS.get(kind, 1) * head_size
    if head_size % 8 or not 8 <= width <= MAX_HEAD_SIZE:
        raise ValueError(
            f"kind {kind} of head size {head_size}: the C++ kernels take multiples of 8, and up to "
            f"{MAX_HEAD_SIZE} numbers in a summary"
        )
    if query.stride(2) != 1:
        raise ValueError(f"query must have unit stride in its last dimension, {query.stride()}")
    kv_heads = pool.shape[1]
    out = _scores(batch, kv_heads, out)
    if not rows:
        return out
    entries = pool if pool.dim() == 4 else pool[:, :, None]
    sinks_address, sinks_code = sinks_and_code(softmax.sinks, heads)
    record = _pack_scores(
        out.data_ptr(),
        query.data_ptr(),
        pool.data_ptr(),
        *_addresses(batch),
        sinks_address,
        *(SCORE_KINDS.index(kind), COMBINES.index(combine)),
        *(dtype_code("query", query), cache_code(pool), sinks_code),
        *(rows, heads, kv_heads, head_size, batch.block_size, pool.shape[0]),
        *(*batch.block_table.shape, entries.shape[2], out.shape[2]),
        *query.stride()[:2],
        *entries.stride()[:3],
        *(table_stride(batch.block_table, 1), torch.get_num_threads()),
        *(softmax.scale * batch.key_scale, softmax.soft_cap),
    )
    run("score_pages", record)
    return out


def select_pages(
    batch: PageBatch,
    scores: torch.Tensor,
    budgets: torch.Tensor,
    *,
    sinks: int = 0,
    recent: int = 1,
    max_selected: int | None = None,
    out: PageSelection | None = None,
) -> PageSelection:
    """Select with one thread for each row and KV head, by a search for the last score chosen."""
    check_page_counts(sinks, recent)
    rows, kv_heads = batch.positions.shape[0], scores.shape[1]
    if scores.dtype != torch.float32 or scores.dim() != 3 or scores.shape[0] < rows:
        raise ValueError(
            f"scores must be float32 [>= {rows}, G, pages], got {scores.dtype} {list(scores.shape)}"
        )
    if scores.shape[2] > 1 and scores.stride(2) != 1:
        raise ValueError(f"scores must have unit stride in its last dimension, {scores.stride()}")
    if out is None:
        if max_selected is None:
            max_selected = _most_selected(batch, budgets, sinks, recent)
        out = PageSelection.empty(rows, kv_heads, max_selected, scores.device)
    parts = _parts(out, rows, kv_heads)
    found = PageSelection(*parts)
    if not rows:
        return found
    record = _pack_select(
        *(part.data_ptr() for part in parts),
        scores.data_ptr(),
        *_addresses(batch),
        vector_address("budgets", budgets, rows),
        # Blocks are copied and not read, so any number of them will do.
        *(rows, kv_heads, batch.block_size, 2**31 - 1, *batch.block_table.shape),
        *(found.pages.shape[2], scores.shape[2], *scores.stride()[:2]),
        *(table_stride(batch.block_table, 1), sinks, recent, torch.get_num_threads()),
    )
    run("select_pages", record)
    return found


def _addresses(batch: PageBatch) -> tuple[int, ...]:
    """Return the addresses of the block table, the requests, the positions and the skips."""
    rows = batch.positions.shape[0]
    return (
        batch.block_table.data_ptr(),
        vector_address("requests", batch.requests, rows),
        vector_address("positions", batch.positions, rows),
        vector_address("skips", batch.skips, rows),
    )


def _scores(batch: PageBatch, kv_heads: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return the memory of the scores: that which was given, or new memory."""
    rows, most = batch.query.shape[0], batch.max_pages
    if out is None:
        if most is None:
            most = int(_visible(batch).max()) if rows else 1
        return torch.empty((rows, kv_heads, max(most, 1) - 1))
    if out.dtype != torch.float32 or out.dim() != 3 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 [>= {rows}, {kv_heads}, pages]")
    if out.shape[0] < rows or out.shape[1] != kv_heads:
        raise ValueError(f"out must be [>= {rows}, {kv_heads}, pages], got {list(out.shape)}")
    return out[:rows]


def _visible(batch: PageBatch) -> torch.Tensor:
    """Count the pages that each row sees."""
    return batch.positions // batch.block_size - batch.skips // batch.block_size + 1


def _most_selected(batch: PageBatch, budgets: torch.Tensor, sinks: int, recent: int) -> int:
    """Return the largest number of pages that a row chooses."""
    if not batch.positions.shape[0]:
        return 0
    always = (batch.skips % batch.block_size > 0).int().clamp(min=sinks) + recent
    return int(torch.minimum(_visible(batch), torch.maximum(budgets, always)).max())


def _parts(out: PageSelection, rows: int, kv_heads: int) -> list[torch.Tensor]:
    """Check the memory of a selection, and return its first rows in the order of its fields."""
    lists = (out.pages.shape[0], kv_heads, out.pages.shape[-1])
    parts = [out.block_table, out.pages, out.counts, out.seq_lens, out.skips]
    for i, part in enumerate(parts):
        shape = lists if i < 2 else lists[:1]
        if part.dtype != torch.int32 or part.shape != shape or not part.is_contiguous():
            raise ValueError(
                f"a selection must be contiguous int32 {list(lists)} and {list(lists[:1])}, got "
                f"{part.dtype} {list(part.shape)}"
            )
        if part.shape[0] < rows:
            raise ValueError(f"the selection has {part.shape[0]} rows, fewer than {rows}")
    return [part[:rows] for part in parts]
