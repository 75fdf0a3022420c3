# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels that choose pages, as `kernels/cpu/functions.py` calls the others."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu import checks
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import PAGE_SCORES, PAGE_SELECT, SUMMARIES
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.pages.kernels.checks import (
    check_scoring,
    check_selecting,
    check_summaries,
    most_selected,
    scores_to_fill,
    selection_to_fill,
)
from vllm_pyramid.methods.pages.kernels.records import (
    COMBINES,
    SCORE_KINDS,
    SUMMARY_KINDS,
    SUMMARY_ROWS,
    PageBatch,
    PageSelection,
)

# Only attention of devices chooses so; on the CPU that is a rehearsal, which needs no library.
from vllm_pyramid.methods.pages.kernels.reference import choose_pages as choose_pages


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
    strides = checks.check_cache("key_cache", key_cache)
    check_summaries(summaries, key_cache, kind)
    blocks, heads, block_size, head_size = key_cache.shape
    checks.check_head_size(head_size)
    requests = seq_lens.shape[0]
    record = SUMMARIES.pack(
        summaries.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        checks.vector_address("starts", starts, requests),
        checks.vector_address("seq_lens", seq_lens, requests),
        checks.vector_address("skips", skips, requests),
        *(SUMMARY_KINDS.index(kind), checks.cache_code(key_cache)),
        checks.DTYPE_CODES[summaries.dtype],
        *(heads, head_size, block_size, blocks, requests, block_table.shape[1]),
        *strides,
        *summaries.stride()[:2],
        *(checks.table_stride(block_table, requests), torch.get_num_threads()),
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
    check_scoring(batch, softmax, pool, kind, combine)
    checks.check_scale("key_scale", batch.key_scale)
    if not softmax.scale > 0:
        raise ValueError(f"scale must be positive, got {softmax.scale}")
    query = batch.query
    rows, heads, head_size = query.shape
    width = SUMMARY_ROWS.get(kind, 1) * head_size
    if head_size % 8 or not 8 <= width <= checks.MAX_HEAD_SIZE:
        raise ValueError(
            f"kind {kind} of head size {head_size}: the C++ kernels take multiples of 8, and up to "
            f"{checks.MAX_HEAD_SIZE} numbers in a summary"
        )
    if query.stride(2) != 1:
        raise ValueError(f"query must have unit stride in its last dimension, {query.stride()}")
    kv_heads = pool.shape[1]
    out = scores_to_fill(batch, kv_heads, out)
    if not rows:
        return out
    entries = pool if pool.dim() == 4 else pool[:, :, None]
    sinks_address, sinks_code = checks.sinks_and_code(softmax.sinks, heads)
    record = PAGE_SCORES.pack(
        out.data_ptr(),
        query.data_ptr(),
        pool.data_ptr(),
        *_addresses(batch),
        sinks_address,
        *(SCORE_KINDS.index(kind), COMBINES.index(combine)),
        *(checks.dtype_code("query", query), checks.cache_code(pool), sinks_code),
        *(rows, heads, kv_heads, head_size, batch.block_size, pool.shape[0]),
        *(*batch.block_table.shape, entries.shape[2], out.shape[2]),
        *query.stride()[:2],
        *entries.stride()[:3],
        *(checks.table_stride(batch.block_table, 1), torch.get_num_threads()),
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
    rows, kv_heads = batch.positions.shape[0], scores.shape[1]
    check_selecting(scores, rows, sinks, recent)
    if out is None:
        if max_selected is None:
            max_selected = most_selected(batch, budgets, sinks, recent)
        out = PageSelection.empty(rows, kv_heads, max_selected, scores.device)
    found = selection_to_fill(rows, kv_heads, out)
    if not rows:
        return found
    record = PAGE_SELECT.pack(
        found.block_table.data_ptr(),
        found.pages.data_ptr(),
        found.counts.data_ptr(),
        found.seq_lens.data_ptr(),
        found.skips.data_ptr(),
        scores.data_ptr(),
        *_addresses(batch),
        checks.vector_address("budgets", budgets, rows),
        # Blocks are copied and not read, so any number of them will do.
        *(rows, kv_heads, batch.block_size, 2**31 - 1, *batch.block_table.shape),
        *(found.pages.shape[2], scores.shape[2], *scores.stride()[:2]),
        *(checks.table_stride(batch.block_table, 1), sinks, recent, torch.get_num_threads()),
    )
    run("select_pages", record)
    return found


def _addresses(batch: PageBatch) -> tuple[int, ...]:
    rows = batch.positions.shape[0]
    return (
        batch.block_table.data_ptr(),
        checks.vector_address("requests", batch.requests, rows),
        checks.vector_address("positions", batch.positions, rows),
        checks.vector_address("skips", batch.skips, rows),
    )
