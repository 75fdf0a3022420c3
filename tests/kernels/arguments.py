# SPDX-License-Identifier: Apache-2.0
"""The kernels' records, made from a test's keyword arguments."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import pytest
import torch

from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.thinning.kernels import RecentBatch

# The kernels in `triton_matrix` run on CPU tensors under Triton's interpreter, or on a device.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def take(record: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that name a field of the record, and return them."""
    names = {field.name for field in fields(record)}
    return {name: options.pop(name) for name in list(options) if name in names}


def take_softmax(options: dict[str, Any], scale: float) -> Softmax:
    """Make a softmax of the options that name its fields, and remove them."""
    return Softmax(**{"scale": scale, **take(Softmax, options)})


def head_sinks(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return different sinks, `[heads]`."""
    return torch.linspace(4.0, 9.0, heads).to(dtype)


def softmax_of(batch: AttentionBatch, **options: Any) -> Softmax:
    return Softmax(batch.query.shape[2] ** -0.5, **options)


def attend(
    module: Any, batch: AttentionBatch, softmax: Softmax, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, in float64 where `compute_dtype` is given, and the log-sum-exp."""
    tokens, heads, size = batch.query.shape
    dtype = torch.float64 if "compute_dtype" in more else torch.float32
    wider, lse = (
        torch.full((tokens, heads + 1, size), 7.0, dtype=dtype),
        torch.full((tokens, heads), 9.0),
    )
    out = wider[:, :heads]  # of strides that the query has not
    module.paged_attention(out, batch, softmax, **{"log_sum_exp": lse, **more})
    assert (wider[:, heads] == 7.0).all()
    return out, lse


def softmax_options(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Return windows, caps and sinks of four heads, alone and together."""
    sinks = torch.tensor([0.5, -2.0, 4.0, 1.0], dtype=dtype)
    return [
        {"sliding_window": 20},
        {"sliding_window": 100, "soft_cap": 3.0},
        {"soft_cap": 1.5},
        {"sinks": sinks},
        {"sinks": sinks, "soft_cap": 2.0, "sliding_window": 33},
    ]


def take_reduction(options: dict[str, Any]) -> Reduction:
    """Make a reduction of the options that name its fields, and remove them."""
    return Reduction(**take(Reduction, options))


def check_no_requests(module: Any, batch: Any) -> None:
    """Call every function of a back end for no requests, with and without the known maxima."""
    key, value, softmax = batch.key_cache, batch.value_cache, Softmax(0.125)
    before = [cache.clone() for cache in (key, value)]
    none = torch.zeros(0, dtype=torch.int32)
    table, query = batch.block_table[:0], batch.query[:0]
    for longest in (None, 30):
        prompts = WindowBatch(query, key, table, none, none, 8, max_prompt_len=longest)
        recents = RecentBatch(
            query, key, table, none, none, none, none, none, max_context=longest, max_recent=longest
        )
        with pytest.raises(ValueError, match="at least one request"):
            module.window_scores(prompts, softmax, Reduction())
        with pytest.raises(ValueError, match="at least one request"):
            module.recent_mass(recents, softmax, distance_weight=1.0)
        with pytest.raises(ValueError, match="at least one request"):
            module.future_queries(query, none, none, None, queries=8, positions=2)
        with pytest.raises(ValueError, match="at least one request"):
            module.observed_expected_scores(prompts, value, softmax, ScoreShape(0, 8))
        scores = torch.zeros(0, key.shape[1], 30)
        with pytest.raises(ValueError, match="at least one request"):
            module.select(scores, none, none, window=8, max_keep=longest)
        kept = torch.zeros(0, key.shape[1], 8, dtype=torch.int32)
        module.compact(key, value, table, kept, none, none, max_keep=longest)
        module.copy_blocks(key, value, none, none)
        assert module.unrankable(scores, none, none).shape == (0,)
        start = torch.zeros(1, dtype=torch.int32)
        attention = AttentionBatch(
            query, key, value, table, start, none, none, max_query_len=longest, max_seq_len=longest
        )
        module.paged_attention(torch.empty_like(query), attention, softmax)
        module.topn_attention(torch.empty_like(query), attention, softmax, none)
        module.add_key_mass(torch.zeros(key.shape[:3]), attention, softmax)
    for cache, old in zip((key, value), before, strict=True):
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
