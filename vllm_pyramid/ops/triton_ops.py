# SPDX-License-Identifier: Apache-2.0
"""The kernel contract of `reference.py` on Triton: same functions, same tensors, CUDA.

Beside the contract's arguments each function takes, by keyword, the maxima that a caller knows on
the host (`max_prompt_len`, `max_keep`, `max_query_len`, `max_seq_len`). With them nothing
synchronises with the device; without them the maximum is read back from it. A maximum may be larger
than the true one; too small a one loses data.

`paged_attention` with a `Workspace` allocates nothing, so it may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from vllm_pyramid.ops.recall import kept_mass
from vllm_pyramid.ops.triton_attention import combine_kernel, decode_kernel, prefill_kernel
from vllm_pyramid.ops.triton_checks import (
    check_cache,
    check_float32,
    check_query,
    check_table,
    check_unit_stride,
    lse_or,
)
from vllm_pyramid.ops.triton_config import (
    Workspace,
    choose_num_splits,
    decode_config,
    prefill_config,
    target_programs,
)
from vllm_pyramid.ops.triton_mass_ops import add_key_mass
from vllm_pyramid.ops.triton_move import compact_kernel, reshape_and_cache_kernel
from vllm_pyramid.ops.triton_score_ops import window_scores
from vllm_pyramid.ops.triton_select import select_kernel
from vllm_pyramid.ops.triton_tables import effective_lens, shift_block_tables_
from vllm_pyramid.ops.triton_topn_ops import topn_attention

__all__ = [
    "Workspace",
    "add_key_mass",
    "compact",
    "effective_lens",
    "kept_mass",
    "paged_attention",
    "reshape_and_cache",
    "select",
    "shift_block_tables_",
    "topn_attention",
    "window_scores",
]

LOG2_E = 1.4426950408889634
BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `reference.reshape_and_cache`."""
    check_cache(key_cache, value_cache)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    num_tokens = slot_mapping.shape[0]
    for name, tensor in (("key", key), ("value", value)):
        check_unit_stride(name, tensor)
        if tensor.shape[0] < num_tokens or tensor.shape[1:] != (num_kv_heads, head_size):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must be [>= {num_tokens}, {num_kv_heads}, "
                f"{head_size}] for the slot mapping and the cache given"
            )
    if num_tokens == 0:
        return
    block = min(1024, triton.next_power_of_2(num_kv_heads * head_size))
    reshape_and_cache_kernel[(num_tokens, triton.cdiv(num_kv_heads * head_size, block))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_splits: int | None = None,
    workspace: Workspace | None = None,
) -> None:
    """See `reference.paged_attention`. Softmax and sums in float32, products of the cache's dtype.

    Requests with one query go to the split decode kernel, all others to the prefill kernel; the
    choice is made on the device for each request, so mixed batches need no reordering.

    Args:
        max_query_len: 1 skips the prefill launch.
        max_seq_len: bounds the number of splits; default the table's capacity.
        num_splits: of the decode context, a power of two; default by `choose_num_splits`.
        workspace: scratch for more than one split; allocated here if None.

    Raises:
        ValueError: shapes, dtypes, strides or workspace do not fit.
    """
    check_cache(key_cache, value_cache)
    check_float32(compute_dtype)
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    group = check_query(query, key_cache)
    check_unit_stride("out", out)
    if out.shape != query.shape:
        raise ValueError(f"out {tuple(out.shape)} and query {tuple(query.shape)} must be equal")
    lse = lse_or(log_sum_exp, query)
    num_requests = seq_lens.shape[0]
    check_table(block_table, num_requests)
    if query_start_loc.shape[0] < num_requests + 1 or skips.shape[0] < num_requests:
        raise ValueError(
            f"query_start_loc has {query_start_loc.shape[0]} and skips {skips.shape[0]} entries; "
            f"{num_requests} requests need {num_requests + 1} and {num_requests}"
        )
    if num_requests == 0 or query.shape[0] == 0:
        return
    if max_query_len is None:
        spans = query_start_loc[1 : num_requests + 1] - query_start_loc[:num_requests]
        max_query_len = int(spans.max().item())
    if max_seq_len is None:
        max_seq_len = block_table.shape[1] * block_size

    element_size = key_cache.element_size()
    config = decode_config(head_size, element_size, group)
    pairs = num_requests * num_kv_heads
    if num_splits is None:
        programs = workspace.programs if workspace else target_programs(query.device)
        num_splits = choose_num_splits(programs, pairs, max_seq_len, config["BLOCK_K"])
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"num_splits must be a power of two, got {num_splits}")
    if num_splits > 1:
        rows = pairs * group * num_splits
        if workspace is None:
            workspace = Workspace.allocate(
                query.shape[1], num_kv_heads, head_size, query.device, rows=rows
            )
        elif workspace.partial_max.numel() < rows or workspace.partial_out.shape[1] != head_size:
            raise ValueError(
                f"the workspace holds {workspace.partial_max.numel()} rows of "
                f"{workspace.partial_out.shape[1]}; {num_requests} requests * {query.shape[1]} "
                f"heads * {num_splits} splits need {rows} of {head_size}: allocate it with rows="
            )
    # With one split the scratch is not touched, but the kernel wants pointers.
    partials = (
        (workspace.partial_out, workspace.partial_max, workspace.partial_sum)
        if num_splits > 1 and workspace is not None
        else (out, out, out)
    )
    inputs = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, skips)
    sink_logits = sinks if sinks is not None else seq_lens
    scalars = (
        sink_logits,
        scale * LOG2_E,
        soft_cap * LOG2_E,
        sliding_window,
        *out.stride()[:2],
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
    )
    switches = {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HAS_SOFT_CAP": soft_cap != 0,
        "HAS_WINDOW": sliding_window > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_LSE": log_sum_exp is not None,
    }
    decode_kernel[(num_requests, num_kv_heads, num_splits)](
        out, *partials, lse, *inputs, *scalars, SPLITS=num_splits, **switches, **config
    )
    if num_splits > 1:
        combine_kernel[(num_requests, query.shape[1])](
            out,
            *partials,
            lse,
            query_start_loc,
            sink_logits,
            *out.stride()[:2],
            HEAD_SIZE=head_size,
            BLOCK_D=config["BLOCK_D"],
            SPLITS=num_splits,
            HAS_SINKS=sinks is not None,
            HAS_LSE=log_sum_exp is not None,
            num_warps=4,
        )
    if max_query_len > 1:
        config = prefill_config(head_size, element_size)
        tiles = triton.cdiv(max_query_len, config["BLOCK_M"])
        prefill_kernel[(tiles, query.shape[1], num_requests)](
            out, lse, *inputs, *scalars, **switches, **config
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
    """See `reference.select`. The result has `max_keep` columns."""
    if scores.dtype != torch.float32 or scores.dim() != 3 or scores.stride(2) != 1:
        raise ValueError(
            f"scores must be float32 [R, G, n] with unit stride, got {scores.dtype} "
            f"{tuple(scores.shape)} with strides {scores.stride()}"
        )
    num_requests, num_kv_heads = scores.shape[:2]
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
    """See `reference.compact`. Any dtype of 1, 2 or 4 bytes; `max_keep` is not needed here."""
    del max_keep
    element_size = key_cache.element_size()
    if element_size not in BITS_OF_SIZE or value_cache.element_size() != element_size:
        raise ValueError(
            f"compact moves caches of 1, 2 or 4 bytes an element, both alike; got "
            f"{key_cache.dtype} and {value_cache.dtype}"
        )
    bits = BITS_OF_SIZE[element_size]
    key_cache, value_cache = key_cache.view(bits), value_cache.view(bits)
    check_cache(key_cache, value_cache, dtypes=(bits,))
    num_kv_heads, block_size, head_size = key_cache.shape[1:]
    num_requests = prompt_lens.shape[0]
    check_table(block_table, num_requests)
    check_unit_stride("kept", kept)
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
