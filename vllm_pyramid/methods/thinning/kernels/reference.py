# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` in plain PyTorch."""

from __future__ import annotations

import math

import torch

from vllm_pyramid.kernels.gather_tokens import gather_scaled
from vllm_pyramid.kernels.log_sum_exp import check_lse, check_some_requests, with_sinks
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.thinning.kernels import RecentBatch


def recent_mass(
    batch: RecentBatch,
    softmax: Softmax,
    *,
    distance_weight: float,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    query, key_cache = batch.query, batch.key_cache
    num_kv_heads = key_cache.shape[1]
    check_some_requests(batch.seq_lens.shape[0])
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    columns = int(batch.contexts.max()) if batch.max_context is None else batch.max_context
    out = torch.zeros((batch.seq_lens.shape[0], num_kv_heads, columns), device=query.device)
    rows = zip(
        *(batch.query_ends.tolist(), batch.seq_lens.tolist(), batch.skips.tolist()),
        *(batch.recents.tolist(), batch.contexts.tolist()),
        strict=True,
    )
    for r, (end, seq_len, skip, recent, context) in enumerate(rows):
        q = query[end - recent : end].to(compute_dtype).unflatten(1, (num_kv_heads, -1))
        table, scales = batch.block_table[r], batch.key_scales
        k = gather_scaled(key_cache, scales, table, skip, seq_len, compute_dtype)
        logits = torch.einsum("wgqd,kgd->gqwk", q, k) * (softmax.scale * batch.key_scale)
        if softmax.soft_cap:
            logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
        key_pos = torch.arange(skip, seq_len, device=q.device)
        query_pos = torch.arange(seq_len - recent, seq_len, device=q.device)
        logits.masked_fill_(key_pos[None, :] > query_pos[:, None], -math.inf)
        weights = torch.linspace(1.0, distance_weight, recent, dtype=compute_dtype, device=q.device)
        if log_sum_exp is None:
            lse = logits.logsumexp(dim=-1)
        else:
            lse = (
                log_sum_exp[end - recent : end].to(compute_dtype).T.unflatten(0, (num_kv_heads, -1))
            )
        lse = with_sinks(lse, softmax.sinks)
        probs = (logits - lse[..., None]).exp() * (weights / weights.sum())[:, None]
        first = seq_len - recent - context - skip
        out[r, :, :context] = probs[..., first : first + context].sum(dim=(1, 2)).float()
    return out
