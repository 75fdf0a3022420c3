# SPDX-License-Identifier: Apache-2.0
"""The back end in Triton for CUDA: this module implements `Ops` of `contract.py`.

If the caller passes the maxima that it knows on the host (the `max_*` of the records and of
`select`), no function synchronises with the device; without them it reads the maximum back.

`paged_attention` with a `Workspace` allocates nothing, so a CUDA graph may capture it.
"""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.kernels.contract import of_back_end
from vllm_pyramid.kernels.log_sum_exp import check_scores, check_some_requests
from vllm_pyramid.kernels.reference_attention import shared_attention  # not used on CUDA
from vllm_pyramid.kernels.triton.attention_launch import paged_attention
from vllm_pyramid.kernels.triton.checks import check_cache, check_table, check_unit_stride
from vllm_pyramid.kernels.triton.move import compact_kernel, copy_blocks_kernel, write_rows_kernel
from vllm_pyramid.kernels.triton.select import select_kernel, unrankable_kernel
from vllm_pyramid.kernels.triton.tiles import Workspace
from vllm_pyramid.kernels.triton.window_scores_launch import window_scores

__all__ = [
    "Workspace",
    "compact",
    "copy_blocks",
    "of_method",
    "paged_attention",
    "reshape_and_cache",
    "select",
    "shared_attention",
    "unrankable",
    "window_scores",
    "write_rows",
]

of_method = of_back_end("triton")

# Bits of the mantissa, bias of the exponent, and the largest number as the bits of a float32.
FP8_BITS = {
    torch.float8_e4m3fn: {"MANTISSA": 3, "BIAS": 7, "MOST": 0x43E00000},
    torch.float8_e5m2: {"MANTISSA": 2, "BIAS": 15, "MOST": 0x47600000},
}
BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    check_cache(key_cache, value_cache)
    write_rows(key, key_cache, slot_mapping, scale=key_scale)
    write_rows(value, value_cache, slot_mapping, scale=value_scale)


def write_rows(
    rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, scale: float = 1.0
) -> None:
    """Write with one program for each token and piece of its row; the cache may be host memory."""
    check_cache(cache, cache)
    check_unit_stride("rows", rows)
    num_kv_heads, block_size, head_size = cache.shape[1:]
    num_tokens = slot_mapping.shape[0]
    if rows.shape[0] < num_tokens or rows.shape[1:] != (num_kv_heads, head_size):
        raise ValueError(
            f"rows {tuple(rows.shape)} must be [>= {num_tokens}, {num_kv_heads}, {head_size}] for "
            "the slot mapping and the cache given"
        )
    if num_tokens == 0:
        return
    bits = FP8_BITS.get(cache.dtype, {"MANTISSA": 0, "BIAS": 0, "MOST": 0})
    if bits["MANTISSA"]:
        cache = cache.view(torch.uint8)
    block = min(1024, triton.next_power_of_2(num_kv_heads * head_size))
    write_rows_kernel[(num_tokens, triton.cdiv(num_kv_heads * head_size, block))](
        rows,
        cache,
        slot_mapping,
        scale,
        *rows.stride()[:2],
        *cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        **bits,
        num_warps=4,
    )


def select(
    scores: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    max_keep: int | None = None,
) -> torch.Tensor:
    check_scores(scores)
    num_requests, num_kv_heads = scores.shape[:2]
    check_some_requests(num_requests)
    if max_keep is None:
        max_keep = int(keeps.max().item())
    kept = torch.empty(
        num_requests, num_kv_heads, max_keep, dtype=torch.int32, device=scores.device
    )
    block = min(2048, max(128, triton.next_power_of_2(scores.shape[2])))
    select_kernel[(num_requests * num_kv_heads,)](
        kept,
        scores,
        prompt_lens,
        keeps,
        sinks,
        max_keep,
        *scores.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        WINDOW=window,
        BLOCK=block,
        num_warps=8 if block >= 1024 else 4,
    )
    return kept


def compact(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kept: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    max_keep: int | None = None,
) -> None:
    """Move the rows as integers of 1, 2 or 4 bytes; `max_keep` is not used."""
    del max_keep
    key_cache, value_cache = _as_bits(key_cache, value_cache)
    element_size = key_cache.element_size()
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    num_requests = prompt_lens.shape[0]
    check_table(block_table, num_requests)
    check_unit_stride("kept", kept)
    if num_requests == 0:
        return
    # Pieces of 64 bytes (two sectors of DRAM) give a small batch enough programs to run in.
    block_d = min(64 // element_size, triton.next_power_of_2(head_size))
    compact_kernel[(num_requests * num_kv_heads, triton.cdiv(head_size, block_d), 2)](
        key_cache,
        value_cache,
        block_table,
        kept,
        prompt_lens,
        keeps,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        *kept.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_ROWS=128,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Copy the rows as integers of 1, 2 or 4 bytes, in one launch without scratch memory."""
    key_cache, value_cache = _as_bits(key_cache, value_cache)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    if sources.shape != targets.shape or sources.dim() != 1:
        raise ValueError(
            f"sources and targets must both be [n] block ids, got {tuple(sources.shape)} and "
            f"{tuple(targets.shape)}"
        )
    check_unit_stride("sources", sources)
    check_unit_stride("targets", targets)
    if not len(sources):
        return
    block_d = triton.next_power_of_2(head_size)
    copy_blocks_kernel[(len(sources), num_kv_heads, 2)](
        key_cache,
        value_cache,
        sources,
        targets,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_ROWS=min(triton.next_power_of_2(block_size), max(1, 4096 // block_d)),
        BLOCK_SIZE=block_size,
        num_warps=4,
    )


def unrankable(scores: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Look with one program for each request and KV head, then join the heads."""
    check_scores(scores)
    num_requests, num_kv_heads, num_columns = scores.shape
    wrong = torch.empty(num_requests, num_kv_heads, dtype=torch.bool, device=scores.device)
    if wrong.numel():
        unrankable_kernel[(wrong.numel(),)](
            wrong,
            scores,
            firsts,
            ends,
            num_columns,
            *scores.stride()[:2],
            NUM_KV_HEADS=num_kv_heads,
            BLOCK=1024,
            num_warps=4,
        )
    return wrong.any(dim=1)


def _as_bits(
    key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches as integers: bits are moved, not values."""
    element_size = key_cache.element_size()
    if element_size not in BITS_OF_SIZE or value_cache.element_size() != element_size:
        raise ValueError(
            f"caches of 1, 2 or 4 bytes an element are moved, both alike; got "
            f"{key_cache.dtype} and {value_cache.dtype}"
        )
    bits = BITS_OF_SIZE[element_size]
    key_cache, value_cache = key_cache.view(bits), value_cache.view(bits)
    check_cache(key_cache, value_cache, dtypes=(bits,))
    return key_cache, value_cache
