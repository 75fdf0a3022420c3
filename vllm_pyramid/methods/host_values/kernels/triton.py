# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels for V in host memory: checks, scratch memory and launches."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from vllm_pyramid.kernels.gather_tokens import check_one_scale, check_one_table
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton.attention_launch import paged_attention
from vllm_pyramid.kernels.triton.checks import check_cache, check_query, check_table
from vllm_pyramid.kernels.triton.tiles import decode_config, padded_head_size
from vllm_pyramid.methods.host_values.kernels import Choosers
from vllm_pyramid.methods.host_values.kernels.reference import check_value_rows
from vllm_pyramid.methods.host_values.kernels.triton_kernels import (
    copy_pages_kernel,
    topn_choose_kernel,
    topn_logits_kernel,
    topn_values_kernel,
)

LOG2_E = 1.4426950408889634
_ALIGNMENT = 64  # numbers; less aligned parts of the scratch would compile other variants


def topn_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    top_ns: torch.Tensor,
    *,
    renormalize: bool = False,
    value_rows: torch.Tensor | None = None,
    choosers: Choosers | None = None,
) -> None:
    """Attend to other requests with `paged_attention`, and to choosers in three launches.

    A workspace must have room for one chooser, `workspace_cells(1, ...)`.
    """
    query, key_cache, value_cache = batch.query, batch.key_cache, batch.value_cache
    query_start_loc, seq_lens, skips = batch.query_start_loc, batch.seq_lens, batch.skips
    sliding_window = softmax.sliding_window
    check_one_scale(batch.key_scales, batch.value_scales)
    check_one_table(batch.block_table)
    check_cache(key_cache, value_cache)
    check_query(query, key_cache)
    num_requests = seq_lens.shape[0]
    if top_ns.dtype != torch.int32 or top_ns.shape != (num_requests,):
        raise ValueError(
            f"top_ns must be int32 [{num_requests}], got {top_ns.dtype} {tuple(top_ns.shape)}"
        )
    if value_rows is not None:
        check_value_rows(value_rows, num_requests)
    if choosers is None or value_rows is not None or not choosers.alone:
        queries = query_start_loc[1 : num_requests + 1] - query_start_loc[:num_requests]
        seen = seq_lens - skips
        if sliding_window:
            seen = seen.clamp(max=sliding_window)
        chooses = (top_ns > 0) & (top_ns < seen) & (queries > 0)
        # Here the requests that choose see no key, so none of their V is read.
        others = replace(batch, seq_lens=torch.where(chooses, skips, seq_lens))
        paged_attention(out, others, softmax)
        if choosers is None:
            most = int(torch.where(chooses, top_ns, 0).max().item()) if num_requests else 0
            choosers = Choosers(_choosers(chooses, queries), most)
        if value_rows is not None:
            _count_rows(value_rows, batch, softmax, top_ns, choosers.queries, chooses, queries)
    count, num_heads = choosers.queries.shape[0], query.shape[1]
    if not count:
        return
    columns = batch.max_seq_len
    if columns is None:
        columns = batch.block_table.shape[1] * key_cache.shape[2]
    most = choosers.max_top_n
    workspace, at_once = choosers.workspace, count
    each = workspace_cells(1, num_heads, columns, most)
    if workspace is None:
        cells = workspace_cells(count, num_heads, columns, most)
        workspace = torch.empty(cells, dtype=torch.float32, device=query.device)
    elif (at_once := workspace.shape[0] // each) < 1:
        raise ValueError(
            f"the workspace has {workspace.shape[0]} cells; a query of {num_heads} heads that sees "
            f"up to {columns} keys and takes {most} of them needs {each}"
        )
    for start in range(0, count, at_once):
        some = choosers.queries[start : start + at_once]
        _choose(out, batch, softmax, top_ns, some, columns, most, workspace, renormalize)


def workspace_cells(choosers: int, num_heads: int, columns: int, max_top_n: int) -> int:
    """Return the float32 cells that `choosers` queries need at once, which see `columns` keys."""
    return choosers * num_heads * (columns + 2 * max_top_n + 1) + 4 * _ALIGNMENT


def _choose(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    top_ns: torch.Tensor,
    choosers: torch.Tensor,
    columns: int,
    max_top_n: int,
    workspace: torch.Tensor,
    renormalize: bool,
) -> None:
    """Let the queries `choosers`, `[S, 2]`, choose among `columns` keys and sum the V of these."""
    query, key_cache, value_cache = batch.query, batch.key_cache, batch.value_cache
    block_table, query_start_loc = batch.block_table, batch.query_start_loc
    seq_lens, skips = batch.seq_lens, batch.skips
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    num_choosers, num_heads = choosers.shape[0], query.shape[1]
    group, rows = num_heads // num_kv_heads, num_choosers * num_heads
    parts, begin = [], 0
    for cells in (rows * columns, rows * max_top_n, rows * max_top_n, rows):
        parts.append(workspace[begin : begin + cells])
        begin += -(-cells // _ALIGNMENT) * _ALIGNMENT
    logits, best, weights, totals = parts
    best = best.view(torch.int32)
    config = decode_config(head_size, query.element_size(), group)
    window = {"HAS_WINDOW": sliding_window > 0}
    wide = value_cache.element_size() == 4  # take half as many rows, which stay in registers
    tiles = triton.cdiv(columns, config["BLOCK_K"])
    topn_logits_kernel[(num_choosers * num_kv_heads, tiles)](
        logits, query, key_cache, block_table, query_start_loc, seq_lens, skips, choosers,
        softmax.scale * batch.key_scale * LOG2_E, soft_cap * LOG2_E, sliding_window, columns,
        *query.stride()[:2], *key_cache.stride()[:3], block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        HAS_SOFT_CAP=soft_cap != 0, **window, **config,
    )  # fmt: skip
    block = min(2048, max(128, triton.next_power_of_2(columns)))
    topn_choose_kernel[(rows,)](
        best, weights, totals, logits, query_start_loc, seq_lens, skips, top_ns, choosers,
        sinks if sinks is not None else seq_lens, sliding_window, columns, max_top_n,
        NUM_HEADS=num_heads, BLOCK=block, HAS_SINKS=sinks is not None, RENORMALIZE=renormalize,
        **window, num_warps=8 if block >= 1024 else 4,
    )  # fmt: skip
    topn_values_kernel[(rows,)](
        out, best, weights, totals, value_cache, block_table, query_start_loc, seq_lens, skips,
        top_ns, choosers, batch.value_scale, sliding_window, max_top_n,
        *out.stride()[:2], *value_cache.stride()[:3], block_table.stride(0),
        NUM_HEADS=num_heads, GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_D=padded_head_size(head_size), BLOCK_N=16 if wide else 32, **window, num_warps=4,
    )  # fmt: skip


def _count_rows(
    value_rows: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    top_ns: torch.Tensor,
    choosers: torch.Tensor,
    chooses: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """Add the number of V rows that each request needs to `value_rows`."""
    sliding_window = softmax.sliding_window
    whole = batch.seq_lens - batch.skips
    if sliding_window:
        whole = whole.clamp(max=sliding_window + queries - 1)
    num_kv_heads, num_heads = batch.key_cache.shape[1], batch.query.shape[1]
    value_rows += (~chooses & (queries > 0)) * whole.clamp(min=0) * num_kv_heads
    r = choosers[:, 0].long()
    ends = (batch.seq_lens - batch.skips - queries)[r] + choosers[:, 1] + 1
    if sliding_window:
        ends = ends.clamp(max=sliding_window)
    taken = torch.minimum(top_ns[r], ends.clamp(min=0)) * num_heads
    value_rows.index_add_(0, r, taken.long())


def _choosers(chooses: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """List every query of the requests that choose: `[S, 2]`."""
    pairs = [
        (r, i)
        for r, (wanted, count) in enumerate(zip(chooses.tolist(), queries.tolist(), strict=True))
        if wanted
        for i in range(count)
    ]
    return torch.tensor(pairs, dtype=torch.int32, device=chooses.device).view(-1, 2)


def copy_pages(
    target: torch.Tensor, source: torch.Tensor, block_table: torch.Tensor, places: torch.Tensor
) -> None:
    """Copy in 4-byte words, with one program for each place and piece of its page."""
    check_table(block_table, 1)
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(
            f"pages {list(target.shape[1:])} of {target.dtype} and {list(source.shape[1:])} of "
            f"{source.dtype} are not alike"
        )
    for name, pages in (("target", target), ("source", source)):
        if not pages.is_contiguous() or pages[0].nbytes % 4:
            raise ValueError(f"{name} must be dense, with pages of whole words of 4 bytes")
    if places.dtype != torch.int32 or places.shape[1:] != (3,) or not places.is_contiguous():
        raise ValueError(f"places must be int32 [C, 3], got {places.dtype} {list(places.shape)}")
    if places.shape[0] == 0:
        return
    words, block = target[0].nbytes // 4, 1024
    copy_pages_kernel[(places.shape[0], triton.cdiv(words, block))](
        target.view(torch.int32),
        source.view(torch.int32),
        block_table,
        places,
        words,
        block_table.stride(0),
        BLOCK=block,
        num_warps=4,
    )
