# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected` in plain PyTorch, and checks that all back ends make."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from vllm_pyramid.kernels.gather_tokens import check_one_table, gather_scaled
from vllm_pyramid.kernels.log_sum_exp import check_some_requests, with_sinks
from vllm_pyramid.kernels.records import Softmax, WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.step.rotary import Rotary

# The least sum of a head's scores by which they are divided.
LEAST_SUM = 1e-30


def future_queries(
    query: torch.Tensor,
    query_ends: torch.Tensor,
    last_positions: torch.Tensor,
    rotary: Rotary | None,
    *,
    queries: int,
    positions: int,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    check_some_requests(query_ends.shape[0])
    device = query.device
    back = torch.arange(-queries, 0, device=device)
    turned = query[query_ends[:, None] + back].to(compute_dtype)  # [R, W, H, D]
    if rotary is not None:
        table, last = rotary.cos_sin.to(compute_dtype), last_positions[:, None]
        own = (last + 1 + back).clamp(max=len(table) - 1)
        cos, sin = table[own][:, :, None].chunk(2, dim=-1)
        squares = cos.square() + sin.square()  # 1, or more where the embedding scales (YaRN)
        turned = rotary.turn(turned, cos / squares, -sin / squares)
        to_come = last + 1 + torch.arange(positions, device=device)
        mean = table[to_come.clamp(max=len(table) - 1)].mean(dim=1)
        turned = rotary.turn(turned, *mean[:, None, None].chunk(2, dim=-1))
    return turned.transpose(1, 2).contiguous().float()


def observed_expected_scores(
    batch: WindowBatch,
    value_cache: torch.Tensor,
    softmax: Softmax,
    shape: ScoreShape,
    *,
    future: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    check_scored(batch, shape, future)
    query, window, kv_heads = batch.query, batch.window, batch.key_cache.shape[1]
    lens = batch.prompt_lens.tolist()
    longest = max(lens) if batch.max_prompt_len is None else batch.max_prompt_len
    out = torch.full((len(lens), kv_heads, longest), -math.inf, device=query.device)
    begins = [0] * len(lens) if starts is None else starts.tolist()
    ends = batch.query_ends.tolist()
    for r, (start, n, end) in enumerate(zip(begins, lens, ends, strict=True)):
        keys, values = (
            gather_scaled(cache, scales, batch.block_table[r], start, n, compute_dtype)
            .transpose(0, 1)
            .contiguous()
            for cache, scales in ((batch.key_cache, batch.key_scales), (value_cache, value_scales))
        )
        keys *= batch.key_scale
        queries = query[end - window : end].to(compute_dtype).transpose(0, 1)
        inside = slice(shape.sinks, n - start - shape.window)
        scores = torch.zeros(keys.shape[:2], dtype=compute_dtype, device=query.device)
        if inside.start < inside.stop:
            weighed = _observed(queries, keys, softmax) * values.norm(p=1, dim=-1)
            width = shape.kernel_size
            pooled = F.avg_pool1d(weighed[:, : inside.stop], width, stride=1, padding=width // 2)
            scores[:, inside] = shares(pooled[:, inside])
        if inside.start < inside.stop and shape.expected:
            assert future is not None
            own = future[r].to(compute_dtype)
            weights = _expected(own, keys[:, shape.sinks :], softmax)
            weights *= values[:, shape.sinks :].norm(dim=-1)
            counted = weights[:, : inside.stop - shape.sinks]
            scores[:, inside] += shape.expected * shares(counted)
        out[r, :, start:n] = scores.float()
    return out


def _observed(queries: torch.Tensor, keys: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Return what `[H, W, D]` queries give `[G, T, D]` keys, of which the last W are theirs."""
    count = keys.shape[1]
    products = queries.unflatten(0, (len(keys), -1)) @ keys[:, None].mT
    logits = products * softmax.scale  # [G, Q, W, T]
    if softmax.soft_cap:
        logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
    places = torch.arange(count, device=keys.device)
    later = places > places[count - queries.shape[1] :, None]
    logits.masked_fill_(later, -math.inf)
    total = with_sinks(logits.logsumexp(dim=-1), softmax.sinks)
    return (logits - total[..., None]).exp().sum(dim=2).mean(dim=1)


def _expected(future: torch.Tensor, keys: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Return what the queries to come of `[H, W, D]` are expected to give `[G, T, D]` keys."""
    products = future.unflatten(0, (len(keys), -1)) @ keys[:, None].mT * softmax.scale
    logits = products.mean(dim=2) + products.var(dim=2, correction=0) / 2  # [G, Q, T]
    total = logits.logsumexp(dim=-1)
    if softmax.sinks is not None:
        total = total.logaddexp(softmax.sinks.to(total.dtype).view_as(total))
    return (logits - total[..., None]).exp().mean(dim=1)


def shares(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=LEAST_SUM)


def check_scored(batch: WindowBatch, shape: ScoreShape, future: torch.Tensor | None) -> None:
    """Raise ValueError unless there are requests, and window and future queries fit them."""
    requests = batch.prompt_lens.shape[0]
    check_some_requests(requests)
    check_one_table(batch.block_table)
    if not 1 <= batch.window <= shape.window:
        raise ValueError(
            f"{batch.window} queries score: they must be 1 to {shape.window}, the window's tokens"
        )
    if not shape.expected:
        return
    wanted = (requests, batch.query.shape[1], batch.window, batch.query.shape[2])
    if future is None or future.shape != wanted or future.dtype != torch.float32:
        got = "None" if future is None else f"{future.dtype} {list(future.shape)}"
        raise ValueError(f"future must be float32 [R, H, W, D] = {list(wanted)}, got {got}")
    if not future.is_contiguous():
        raise ValueError(f"future must be contiguous, got strides {future.stride()}")
