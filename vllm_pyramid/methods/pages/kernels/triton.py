# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels that choose pages: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.records import FP8_DTYPES, Softmax
from vllm_pyramid.kernels.triton.checks import CACHE_DTYPES, check_table, check_unit_stride
from vllm_pyramid.kernels.triton.tiles import decode_config, padded_head_size
from vllm_pyramid.methods.pages.kernels.checks import (
    check_scoring,
    check_selecting,
    check_starts,
    check_summaries,
    most_selected,
    scores_to_fill,
    selection_to_fill,
)
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageSelection
from vllm_pyramid.methods.pages.kernels.triton_kernels import (
    page_logits_kernel,
    page_weights_kernel,
    select_pages_kernel,
    summarise_pages_kernel,
)

LOG2_E = 1.4426950408889634


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
    """Summarise with one program for each page and KV head; nothing is allocated."""
    check_summaries(summaries, key_cache, kind)
    check_unit_stride("key_cache", key_cache)
    if key_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"key_cache must be one of {CACHE_DTYPES}, got {key_cache.dtype}")
    requests = seq_lens.shape[0]
    check_table(block_table, requests)
    if not requests:
        return
    heads, block_size, head_size = key_cache.shape[1:]
    if max_pages is None:
        check_starts(starts, seq_lens)
        first = torch.maximum(starts, skips) // block_size
        max_pages = int(((seq_lens + block_size - 1) // block_size - first).max())
    if max_pages < 1:
        return
    block_d, block_n = padded_head_size(head_size), triton.next_power_of_2(block_size)
    summarise_pages_kernel[(requests * heads, max_pages)](
        summaries, key_cache, block_table, starts, seq_lens, skips,
        *key_cache.stride()[:3], *summaries.stride()[:2], block_table.stride(0),
        NUM_KV_HEADS=heads, KIND=kind, HEAD_SIZE=head_size, BLOCK_D=block_d, BLOCK_N=block_n,
        BLOCK_SIZE=block_size, num_warps=4 if block_d * block_n <= 4096 else 8,
    )  # fmt: skip


def score_pages(
    batch: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    *,
    kind: str,
    combine: str = "mean",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score in two launches; the logits of all query heads are in scratch memory between them."""
    check_scoring(batch, softmax, pool, kind, combine)
    check_unit_stride("query", batch.query)
    rows, num_heads, head_size = batch.query.shape
    kv_heads, device = pool.shape[1], batch.query.device
    check_table(batch.block_table, 0)
    out = scores_to_fill(batch, kv_heads, out)
    columns = out.shape[2] if batch.max_pages is None else max(batch.max_pages, 1) - 1
    if not rows:
        return out
    group = num_heads // kv_heads
    in_float32 = pool.dtype != batch.query.dtype and pool.dtype not in FP8_DTYPES
    size = 4 if in_float32 else batch.query.element_size()
    config = decode_config(head_size, size, group)
    block_p = config.pop("BLOCK_K")
    block_p = block_p if kind == "rows" else max(16, block_p // 2)
    entries = pool if pool.dim() == 4 else pool[:, :, None]
    logits = torch.empty((rows, num_heads, columns), dtype=torch.float32, device=device)
    numbers = (batch.requests, batch.positions, batch.skips)
    if columns:
        page_logits_kernel[(rows * kv_heads, triton.cdiv(columns, block_p))](
            logits, batch.query, pool, batch.block_table, *numbers,
            softmax.scale * batch.key_scale * LOG2_E, softmax.soft_cap * LOG2_E, columns,
            entries.shape[2], *batch.query.stride()[:2], *entries.stride()[:3],
            batch.block_table.stride(0),
            NUM_KV_HEADS=kv_heads, GROUP=group, KIND=kind, HEAD_SIZE=head_size, BLOCK_P=block_p,
            BLOCK_SIZE=batch.block_size, HAS_SOFT_CAP=softmax.soft_cap != 0,
            IN_FLOAT32=in_float32, **config,
        )  # fmt: skip
    heads_held = triton.next_power_of_2(group)
    block = max(16, min(triton.next_power_of_2(max(columns, 1)), 4096 // heads_held, 1024))
    page_weights_kernel[(rows * kv_heads,)](
        out, logits, *numbers[1:], softmax.sinks if softmax.sinks is not None else batch.skips,
        columns, out.shape[2],
        NUM_KV_HEADS=kv_heads, GROUP=group, ROWS=heads_held, BLOCK=block,
        BLOCK_SIZE=batch.block_size, LARGEST=combine == "max",
        HAS_SINKS=softmax.sinks is not None, num_warps=4,
    )  # fmt: skip
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
    """Select in one launch, with one program for each row and KV head.

    Without `max_selected` and `out` the largest number of pages is read back from the device.
    """
    check_table(batch.block_table, 0)
    rows, kv_heads = batch.positions.shape[0], scores.shape[1]
    check_selecting(scores, rows, sinks, recent)
    if out is None:
        if max_selected is None:
            max_selected = most_selected(batch, budgets, sinks, recent)
        out = PageSelection.empty(rows, kv_heads, max_selected, scores.device)
    found = selection_to_fill(rows, kv_heads, out)
    lists, numbers = (found.block_table, found.pages), (found.counts, found.seq_lens, found.skips)
    width = found.pages.shape[2]
    if not rows or not width:
        return found
    block = min(1024, max(128, triton.next_power_of_2(scores.shape[2])))
    select_pages_kernel[(rows * kv_heads,)](
        *lists, *numbers, scores, batch.block_table, batch.requests, batch.positions, batch.skips,
        budgets, sinks, recent, width, *scores.stride()[:2], batch.block_table.stride(0),
        NUM_KV_HEADS=kv_heads, BLOCK=block, BLOCK_SIZE=batch.block_size,
        num_warps=8 if block >= 1024 else 4,
    )  # fmt: skip
    return found
