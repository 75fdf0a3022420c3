# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch version of every kernel: the oracle of the contract in `contract.py`.

Each function computes one request at a time, in float32 or in the caller's `compute_dtype`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from vllm_pyramid.kernels.contract import of_back_end
from vllm_pyramid.kernels.gather_tokens import gather_scaled, gather_tokens
from vllm_pyramid.kernels.log_sum_exp import check_lse, check_some_requests, with_sinks
from vllm_pyramid.kernels.records import FP8_DTYPES, Reduction, Softmax, WindowBatch
from vllm_pyramid.kernels.reference_attention import paged_attention, shared_attention

__all__ = [
    "compact",
    "copy_blocks",
    "gather_tokens",
    "of_method",
    "paged_attention",
    "reshape_and_cache",
    "select",
    "shared_attention",
    "unrankable",
    "window_scores",
    "write_rows",
]

of_method = of_back_end("reference")


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
    write_rows(key, key_cache, slot_mapping, scale=key_scale)
    write_rows(value, value_cache, slot_mapping, scale=value_scale)


def write_rows(
    rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, scale: float = 1.0
) -> None:
    block_size = cache.shape[2]
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    rows = rows[: len(valid)][valid]
    if cache.dtype in FP8_DTYPES:
        most = torch.finfo(cache.dtype).max
        # By a tensor: on CUDA PyTorch multiplies with the reciprocal of a number, which rounds
        # twice.
        divisor = torch.full((), scale, dtype=torch.float32, device=rows.device)
        rows = (rows.float() / divisor).clamp(-most, most)
    cache[slots // block_size, :, slots % block_size] = rows.to(cache.dtype)


def window_scores(
    batch: WindowBatch,
    softmax: Softmax,
    reduction: Reduction,
    *,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    query, key_cache = batch.query, batch.key_cache
    num_kv_heads = key_cache.shape[1]
    check_some_requests(batch.prompt_lens.shape[0])
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    lens, window = batch.prompt_lens.tolist(), batch.window
    shape = (len(lens), num_kv_heads, max(lens) - window)
    out = torch.full(shape, -math.inf, device=query.device)
    for r, (end, n) in enumerate(zip(batch.query_ends.tolist(), lens, strict=True)):
        q = query[end - window : end].to(compute_dtype)
        table, scales = batch.block_table[r], batch.key_scales
        k = gather_scaled(key_cache, scales, table, 0, n, compute_dtype)
        q = q.unflatten(1, (num_kv_heads, -1))
        logits = torch.einsum("wgqd,kgd->gqwk", q, k) * (softmax.scale * batch.key_scale)
        if softmax.soft_cap:
            logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
        key_pos = torch.arange(n, device=q.device)
        query_pos = torch.arange(n - window, n, device=q.device)
        logits.masked_fill_(key_pos[None, :] > query_pos[:, None], -math.inf)
        if log_sum_exp is None:
            lse = logits.logsumexp(dim=-1)
        else:
            lse = (
                log_sum_exp[end - window : end].to(compute_dtype).T.unflatten(0, (num_kv_heads, -1))
            )
        lse = with_sinks(lse, softmax.sinks)
        mass = (logits - lse[..., None]).exp()[..., : n - window].sum(dim=2)  # [G, Q, n - window]
        if reduction.gqa_reduce == "max":
            mass = mass.amax(dim=1)
        else:
            mass = mass.mean(dim=1) if reduction.gqa_reduce == "mean" else mass.sum(dim=1)
        if reduction.pooling != "none":
            pool = F.avg_pool1d if reduction.pooling == "avg" else F.max_pool1d
            width = reduction.kernel_size
            mass = pool(mass, width, stride=1, padding=width // 2)
        out[r, :, : n - window] = mass.float()
    return out


def select(
    scores: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    max_keep: int | None = None,
) -> torch.Tensor:
    """Sort each request's scores stably, so that equal ones keep the order of positions."""
    check_some_requests(prompt_lens.shape[0])
    lens, counts = prompt_lens.tolist(), keeps.tolist()
    num_kv_heads = scores.shape[1]
    out = torch.full((len(lens), num_kv_heads, max(counts)), -1, dtype=torch.int32)
    for r, (n, keep) in enumerate(zip(lens, counts, strict=True)):
        candidates = scores[r, :, : n - window].clone()
        candidates[:, :sinks] = math.inf
        order = candidates.sort(dim=-1, descending=True, stable=True).indices
        best = order[:, : keep - window].sort(dim=-1).values
        tail = torch.arange(n - window, n, device=best.device).expand(num_kv_heads, -1)
        out[r, :, :keep] = torch.cat([best, tail], dim=1).to(torch.int32).cpu()
    return out.to(scores.device)


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
    """Copy the survivors of each request out of the cache, then write them to their targets."""
    block_size = key_cache.shape[2]
    for r, (n, keep) in enumerate(zip(prompt_lens.tolist(), keeps.tolist(), strict=True)):
        source = kept[r, :, :keep].long()  # [G, keep]
        target = torch.arange(n - keep, n, device=source.device).expand_as(source)
        heads = torch.arange(source.shape[0], device=source.device)[:, None]
        table = block_table[r].long()
        for cache in (key_cache, value_cache):
            rows = cache[table[source // block_size], heads, source % block_size]
            cache[table[target // block_size], heads, target % block_size] = rows


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    for cache in (key_cache, value_cache):
        if cache.dtype in FP8_DTYPES:  # not every device can index those
            cache = cache.view(torch.uint8)
        cache[targets] = cache[sources]


def unrankable(scores: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    highest = scores.amax(dim=1)
    columns = torch.arange(scores.shape[2], device=scores.device)
    counts = (columns >= firsts[:, None]) & (columns < ends[:, None])
    return (~(highest < torch.inf) & counts).any(dim=1)
