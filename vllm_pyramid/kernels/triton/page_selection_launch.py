# SPDX-License-Identifier: Apache-2.0
"""Launchers of page selection, a part of `functions.py`: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.page_records import (
    PageBatch,
    PageSelection,
    check_page_counts,
    check_pool,
    check_summaries,
)
from vllm_pyramid.kernels.records import FP8_DTYPES, Softmax
from vllm_pyramid.kernels.reference_pages import check_no_window
from vllm_pyramid.kernels.triton.checks import CACHE_DTYPES, check_table, check_unit_stride
from vllm_pyramid.kernels.triton.page_selection import (
    page_logits_kernel,
    page_weights_kernel,
    select_pages_kernel,
    summarise_pages_kernel,
)
from vllm_pyramid.kernels.triton.tiles import decode_config, padded_head_size

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
        wrong = (starts < 0) | (starts > seq_lens)
        if wrong.any():
            r = int(wrong.nonzero()[0])
            raise ValueError(
                f"starts of request {r} is {int(starts[r])}, outside 0 .. seq_lens = "
                f"{int(seq_lens[r])}"
            )
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
    check_pool(batch, pool, kind, combine)
    check_no_window(softmax)
    check_unit_stride("query", batch.query)
    rows, num_heads, head_size = batch.query.shape
    kv_heads, device = pool.shape[1], batch.query.device
    check_table(batch.block_table, 0)
    most = batch.max_pages
    if most is None:
        most = _most_pages(batch)
    columns = max(most, 1) - 1
    if out is None:
        out = torch.empty((rows, kv_heads, columns), dtype=torch.float32, device=device)
    elif (
        out.dtype != torch.float32
        or not out.is_contiguous()
        or out.dim() != 3
        or (out.shape[0] < rows or out.shape[1] != kv_heads or out.shape[2] < columns)
    ):
        raise ValueError(
            f"out must be contiguous float32 [>= {rows}, {kv_heads}, >= {columns}], got "
            f"{out.dtype} {list(out.shape)}"
        )
    out = out[:rows]
    if not rows:
        return out
    group = num_heads // kv_heads
    in_float32 = pool.dtype != batch.query.dtype and pool.dtype not in FP8_DTYPES
    size = 4 if in_float32 else batch.query.element_size()
    config = decode_config(head_size, size, group)
    block_p = config.pop("BLOCK_K")
    block_p = block_p if kind in ("mean", "exact", "rows") else max(16, block_p // 2)
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
    check_page_counts(sinks, recent)
    check_unit_stride("scores", scores)
    check_table(batch.block_table, 0)
    rows, kv_heads = batch.positions.shape[0], scores.shape[1]
    if scores.dtype != torch.float32 or scores.dim() != 3 or scores.shape[0] < rows:
        raise ValueError(
            f"scores must be float32 [>= {rows}, G, pages], got {scores.dtype} {list(scores.shape)}"
        )
    if max_selected is None and out is None:
        max_selected = _most_selected(batch, budgets, sinks, recent)
    if out is None:
        out = PageSelection.empty(rows, kv_heads, max_selected or 0, scores.device)
    lists, numbers = (out.block_table, out.pages), (out.counts, out.seq_lens, out.skips)
    wanted = (kv_heads, out.pages.shape[-1])
    for part in (*lists, *numbers):
        of_rows = wanted if part.dim() == 3 else ()
        fits = part.shape[0] >= rows and part.shape[1:] == of_rows
        if part.dtype != torch.int32 or not part.is_contiguous() or not fits:
            raise ValueError(
                f"a selection must be contiguous int32 [>= {rows}, {wanted[0]}, {wanted[1]}] and "
                f"[>= {rows}], got {part.dtype} {list(part.shape)}"
            )
    found = PageSelection(*(part[:rows] for part in (*lists, *numbers)))
    if not rows or not wanted[1]:
        return found
    block = min(1024, max(128, triton.next_power_of_2(scores.shape[2])))
    select_pages_kernel[(rows * kv_heads,)](
        *lists, *numbers, scores, batch.block_table, batch.requests, batch.positions, batch.skips,
        budgets, sinks, recent, wanted[1], *scores.stride()[:2], batch.block_table.stride(0),
        NUM_KV_HEADS=kv_heads, BLOCK=block, BLOCK_SIZE=batch.block_size,
        num_warps=8 if block >= 1024 else 4,
    )  # fmt: skip
    return found


def _visible(batch: PageBatch) -> torch.Tensor:
    """Count the pages that each row sees."""
    return batch.positions // batch.block_size - batch.skips // batch.block_size + 1


def _most_pages(batch: PageBatch) -> int:
    """Read back the largest number of pages that a row sees, and check the rows' skips."""
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


def _most_selected(batch: PageBatch, budgets: torch.Tensor, sinks: int, recent: int) -> int:
    """Read back the largest number of pages that a row chooses."""
    if not batch.positions.shape[0]:
        return 0
    if (wrong := budgets < 1).any():
        s = int(wrong.nonzero()[0])
        raise ValueError(f"budgets of row {s} is {int(budgets[s])}, not positive")
    always = (batch.skips % batch.block_size > 0).int().clamp(min=sinks) + recent
    return int(torch.minimum(_visible(batch), torch.maximum(budgets, always)).max())
