# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels that choose pages: checks, scratch memory, launches."""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.records import FP8_DTYPES, Softmax
from vllm_pyramid.kernels.triton.checks import CACHE_DTYPES, check_table, check_unit_stride
from vllm_pyramid.kernels.triton.tiles import decode_config, padded_head_size, target_programs
from vllm_pyramid.methods.pages.kernels.checks import check_choosing, check_starts, check_summaries
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists
from vllm_pyramid.methods.pages.kernels.triton_kernels import (
    choose_pages_kernel,
    page_logits_kernel,
)
from vllm_pyramid.methods.pages.kernels.triton_summaries import summarise_pages_kernel

LOG2_E = 1.4426950408889634
MOST_TILES = 32  # of pages, which one program scores


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
    check_keys(key_cache)
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


def choose_pages(
    batch: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    budgets: torch.Tensor,
    scores: torch.Tensor,
    out: PageLists,
    *,
    kind: str,
    combine: str = "mean",
    sinks: int = 0,
    recent: int = 1,
    key_cache: torch.Tensor | None = None,
    names: tuple[int, int] = (1, 0),
) -> None:
    """Choose in two launches, between which `scores` has the logits of all query heads.

    One program of the second chooses for a row and KV head. Nothing is allocated or read back.
    """
    check_choosing(batch, softmax, pool, scores, out, kind, combine, sinks, recent)
    check_unit_stride("query", batch.query)
    check_table(batch.block_table, 0)
    rows, num_heads, head_size = batch.query.shape
    if not rows:
        return
    kv_heads, group = pool.shape[1], num_heads // pool.shape[1]
    assert batch.max_pages is not None, "checked"
    columns, stride = batch.max_pages - 1, scores.shape[2]
    in_float32 = pool.dtype != batch.query.dtype and pool.dtype not in FP8_DTYPES
    size = 4 if in_float32 else batch.query.element_size()
    config = decode_config(head_size, size, group)
    block_p = config.pop("BLOCK_K")
    block_p = block_p if kind == "rows" else max(16, block_p // 2)
    entries = pool if pool.dim() == 4 else pool[:, :, None]
    table, table_stride = batch.block_table, batch.block_table.stride(0)
    numbers = (table, batch.requests, batch.positions, batch.skips, budgets)
    if tiles := triton.cdiv(columns, block_p):
        page_logits_kernel[(rows * kv_heads, num_parts(rows * kv_heads, tiles, table.device))](
            scores, batch.query, pool, *numbers,
            softmax.scale * batch.key_scale * LOG2_E, softmax.soft_cap * LOG2_E, stride,
            entries.shape[2], *batch.query.stride()[:2], *entries.stride()[:3], table_stride,
            NUM_KV_HEADS=kv_heads, GROUP=group, KIND=kind, HEAD_SIZE=head_size, BLOCK_P=block_p,
            BLOCK_SIZE=batch.block_size, HAS_SOFT_CAP=softmax.soft_cap != 0,
            IN_FLOAT32=in_float32, **config,
        )  # fmt: skip
    keys = pool if key_cache is None else key_cache
    if key_cache is not None:
        check_summaries(pool, key_cache, kind)
        check_keys(key_cache)
    held, most = triton.next_power_of_2(group), triton.next_power_of_2(max(columns, 1))
    block = min(1024, max(128, most))
    choose_pages_kernel[(rows * kv_heads,)](
        out.block_table, out.seq_lens, out.head_lens, out.skips, out.unranked, out.miscounted,
        scores, pool, keys, *numbers, softmax.sinks if softmax.sinks is not None else budgets,
        stride, sinks, recent, out.block_table.shape[2], *names,
        *keys.stride()[:3], *pool.stride()[:2], table_stride,
        NUM_KV_HEADS=kv_heads, GROUP=group, ROWS=held,
        SOFTMAX_BLOCK=max(16, min(most, 4096 // held, 1024)), BLOCK=block,
        BLOCK_SIZE=batch.block_size, LARGEST=combine == "max",
        HAS_SINKS=softmax.sinks is not None, FILLS=key_cache is not None, KIND=kind,
        HEAD_SIZE=head_size, BLOCK_D=padded_head_size(head_size),
        BLOCK_N=triton.next_power_of_2(batch.block_size), num_warps=4,
    )  # fmt: skip


def num_parts(pairs: int, tiles: int, device: torch.device) -> int:
    """Return how many programs share the `tiles` of the longest row's KV head, for all `pairs`.

    They fill the device, and none has more than `MOST_TILES`.
    """
    enough = triton.cdiv(2 * target_programs(device), pairs)
    return int(min(tiles, max(enough, triton.cdiv(tiles, MOST_TILES))))


def check_keys(key_cache: torch.Tensor) -> None:
    check_unit_stride("key_cache", key_cache)
    if key_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"key_cache must be one of {CACHE_DTYPES}, got {key_cache.dtype}")
