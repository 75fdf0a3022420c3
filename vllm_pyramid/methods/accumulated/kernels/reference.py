# SPDX-License-Identifier: Apache-2.0
"""`add_key_mass` in plain PyTorch, and a check that all back ends make.

`mass[b, g, i]` belongs to the token at offset i of block b for KV head g. The caller sets the mass
of a slot to zero when a token is written there, and moves it together with the tokens.
"""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.gather_tokens import check_one_table, gather_scaled
from vllm_pyramid.kernels.log_sum_exp import check_lse, with_sinks
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.methods.accumulated.kernels import MASS_KINDS

# A weight counts as below the average if it is below this share of the average: equal keys all have
# the average weight, however a softmax in float32 was rounded.
BELOW = 1 - 1e-5


def add_key_mass(
    mass: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    kind: str = "sum",
    first_queries: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    query, key_cache, seq_lens, skips = batch.query, batch.key_cache, batch.seq_lens, batch.skips
    soft_cap, sliding_window, sinks = softmax.soft_cap, softmax.sliding_window, softmax.sinks
    check_mass(mass, key_cache, kind)
    check_one_table(batch.block_table)
    if log_sum_exp is not None:
        check_lse(log_sum_exp, query)
    block_size, group = key_cache.shape[2], query.shape[1] // key_cache.shape[1]
    starts = batch.query_start_loc.tolist()
    for r, (seq_len, skip) in enumerate(zip(seq_lens.tolist(), skips.tolist(), strict=True)):
        position = seq_len - (starts[r + 1] - starts[r])
        begin = starts[r]
        if first_queries is not None:
            ignored = max(0, int(first_queries[r]) - position)
            begin, position = begin + ignored, position + ignored
        if begin >= starts[r + 1]:
            continue
        first = skip
        if sliding_window:  # lower blocks may belong to other requests
            first = max(skip, position - sliding_window + 1)
        key_pos = torch.arange(first, seq_len, device=query.device)
        if not key_pos.numel():
            continue
        blocks, rows = batch.block_table[r, key_pos // block_size].long(), key_pos % block_size
        q = query[begin : starts[r + 1]].to(compute_dtype)
        table, scales = batch.block_table[r], batch.key_scales
        k = gather_scaled(key_cache, scales, table, first, seq_len, compute_dtype)
        k = k.repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * (softmax.scale * batch.key_scale)
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        query_pos = torch.arange(position, seq_len, device=query.device)
        seen = key_pos[None, :] <= query_pos[:, None]
        if sliding_window:
            seen &= key_pos[None, :] > query_pos[:, None] - sliding_window
        logits.masked_fill_(~seen, -torch.inf)
        if log_sum_exp is None:
            lse = logits.logsumexp(dim=-1)
        else:
            lse = log_sum_exp[begin : starts[r + 1]].T.to(compute_dtype)
        lse = with_sinks(lse, sinks)
        # A query that sees nothing gives nothing (-inf less -inf is NaN); other NaN stays NaN.
        given = (logits - lse[..., None]).exp().masked_fill((lse == -torch.inf)[..., None], 0.0)
        if kind == "below_average":
            given = ((given * seen.sum(dim=1)[:, None] < BELOW) & seen).to(compute_dtype)
        per_head = given.sum(dim=1).unflatten(0, (key_cache.shape[1], group)).sum(dim=1)
        mass[blocks, :, rows] += per_head.T.to(mass.dtype)


def check_mass(mass: torch.Tensor, key_cache: torch.Tensor, kind: str) -> None:
    """Raise ValueError unless `mass` is float32 `[P, G, N]` for the cache, and `kind` is known."""
    if mass.dtype != torch.float32 or mass.shape != key_cache.shape[:3] or mass.stride(2) != 1:
        raise ValueError(
            f"mass must be float32 {list(key_cache.shape[:3])}, as the cache's blocks, with unit "
            f"stride in the last dimension, got {mass.dtype} {tuple(mass.shape)}, strides "
            f"{mass.stride()}"
        )
    if kind not in MASS_KINDS:
        raise ValueError(f"kind {kind!r} must be one of {', '.join(MASS_KINDS)}")
