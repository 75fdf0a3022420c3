# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected` in Triton: checks, scratch memory, eight launches."""

from __future__ import annotations

from typing import Any

import torch
import triton

from vllm_pyramid.kernels.log_sum_exp import check_some_requests
from vllm_pyramid.kernels.records import Softmax, WindowBatch
from vllm_pyramid.kernels.triton.checks import (
    CACHE_DTYPES,
    SCALED_DTYPES,
    check_cache,
    check_keys,
    check_unit_stride,
)
from vllm_pyramid.kernels.triton.tiles import padded_head_size
from vllm_pyramid.kernels.triton.window_scores_launch import KEYS_PER_SPLIT, WindowLaunch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.observed_expected.kernels.reference import check_scored
from vllm_pyramid.methods.observed_expected.kernels.triton_future import (
    future_logits_kernel,
    future_queries_kernel,
)
from vllm_pyramid.methods.observed_expected.kernels.triton_kernels import (
    blend_kernel,
    pool_and_sum_kernel,
    weigh_kernel,
)
from vllm_pyramid.step.rotary import Rotary

# Columns of a program that pools. It sums this many at a time, whatever the longest request.
COLUMNS = 512


def future_queries(
    query: torch.Tensor,
    query_ends: torch.Tensor,
    last_positions: torch.Tensor,
    rotary: Rotary | None,
    *,
    queries: int,
    positions: int,
) -> torch.Tensor:
    """Turn all queries by one launch, in float32."""
    requests, (_, num_heads, head_size) = query_ends.shape[0], query.shape
    check_some_requests(requests)
    check_unit_stride("query", query)
    table, rotated, halves = query, 0, True  # without an embedding a pointer that is not read
    if rotary is not None:
        table, rotated, halves = rotary.cos_sin, rotary.cos_sin.shape[1], rotary.halves
        check_unit_stride("cos_sin", table)
        if rotated % 2 or rotated > head_size:
            raise ValueError(f"{rotated} channels cannot turn, of heads with {head_size}")
    shape = (requests, num_heads, queries, head_size)
    future = torch.empty(shape, dtype=torch.float32, device=query.device)
    future_queries_kernel[(requests * num_heads,)](
        future,
        query,
        query_ends,
        last_positions,
        table,
        positions,
        table.shape[0],
        *query.stride()[:2],
        table.stride(0),
        NUM_HEADS=num_heads,
        WINDOW=queries,
        WINDOW_TILE=min(16, triton.next_power_of_2(queries)),
        HEAD_SIZE=head_size,
        BLOCK_D=padded_head_size(head_size),
        ROTATED=rotated,
        HALVES=halves,
        POSITIONS_TILE=16,
        num_warps=4,
    )
    return future


def observed_expected_scores(
    batch: WindowBatch,
    value_cache: torch.Tensor,
    softmax: Softmax,
    shape: ScoreShape,
    *,
    future: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score all requests by seven launches; five where the second score has no weight."""
    check_scored(batch, shape, future)
    launch = WindowLaunch.of(batch, softmax)
    key_cache = batch.key_cache
    dtypes = CACHE_DTYPES if batch.key_scales is None else SCALED_DTYPES
    check_cache(key_cache, value_cache, dtypes, same_blocks=False)
    scales, scale_strides = check_keys(value_cache, value_scales)
    lens, longest, device = batch.prompt_lens, launch.longest, batch.query.device
    requests, kv_heads = lens.shape[0], key_cache.shape[1]
    first = lens if starts is None else starts  # a pointer that is not read without starts
    switches = {"HAS_STARTS": starts is not None, "NUM_KV_HEADS": kv_heads}

    heads = requests * kv_heads * launch.group if shape.expected else 0
    partials = launch.partials(launch.num_rows + heads)
    launch.max_sum(partials, starts)
    logits = expected = batch.query  # pointers that are not read without a second score
    if shape.expected:
        assert future is not None
        logits = torch.empty(heads, longest, dtype=torch.float32, device=device)
        expected = torch.empty(requests, kv_heads, longest, dtype=torch.float32, device=device)
        _future_logits(launch, logits, partials, future, (lens, first), shape, switches)
    log_sum_exp = launch.joined(partials)
    mass = launch.mass(log_sum_exp, longest, "mean")
    switches["HAS_EXPECTED"] = bool(shape.expected)
    tile = max(32, 4096 // padded_head_size(key_cache.shape[3]))
    weigh_kernel[(launch.pairs, triton.cdiv(longest, tile))](
        mass,
        expected,
        logits,
        log_sum_exp,
        lens if softmax.sinks is None else softmax.sinks,
        value_cache,
        scales,
        batch.block_table,
        lens,
        first,
        launch.num_rows,
        longest,
        shape.sinks,
        shape.window,
        *value_cache.stride()[:3],
        *scale_strides,
        batch.block_table.stride(0),
        GROUP=launch.group,
        HEAD_SIZE=key_cache.shape[3],
        BLOCK_D=padded_head_size(key_cache.shape[3]),
        BLOCK_K=tile,
        BLOCK_SIZE=key_cache.shape[2],
        HAS_VALUE_SCALES=value_scales is not None,
        HAS_SINKS=softmax.sinks is not None,
        num_warps=4,
        **switches,
    )
    tiles = triton.cdiv(longest, COLUMNS)
    scores = torch.empty_like(mass)
    sums = torch.empty(2, launch.pairs, tiles, dtype=torch.float32, device=device)
    ends = (longest, tiles, shape.sinks, shape.window)
    pool_and_sum_kernel[(launch.pairs, tiles)](
        *(scores, sums, mass, expected, lens, first, *ends, shape.kernel_size),
        BLOCK=COLUMNS,
        num_warps=4,
        **switches,
    )
    blend_kernel[(launch.pairs, tiles)](
        *(scores, sums, expected, lens, first, shape.expected, *ends),
        BLOCK=COLUMNS,
        TILES=128,
        num_warps=4,
        **switches,
    )
    return scores


def _future_logits(
    launch: WindowLaunch,
    logits: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor],
    future: torch.Tensor,
    lens_and_starts: tuple[torch.Tensor, torch.Tensor],
    shape: ScoreShape,
    switches: dict[str, Any],
) -> None:
    """Write the logits `[R * H, columns]`, and the rows of the partials behind `num_rows`."""
    query, key_cache, scales, block_table = launch.inputs[:4]
    head_tiles = triton.cdiv(launch.group, launch.config["HEADS"])
    own = {name: on for name, on in launch.switches.items() if name != "HAS_SOFT_CAP"}
    future_logits_kernel[(launch.pairs, head_tiles, launch.splits)](
        logits,
        *partials,
        future,
        query,
        key_cache,
        scales,
        block_table,
        *lens_and_starts,
        launch.softmax.scale * launch.batch.key_scale,
        launch.num_rows,
        launch.longest,
        launch.splits,
        shape.sinks,
        *launch.strides[2:],
        TILES_PER_SPLIT=KEYS_PER_SPLIT // launch.config["BLOCK_K"],
        **(own | switches),
    )
