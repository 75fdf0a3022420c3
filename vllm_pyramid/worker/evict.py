# SPDX-License-Identifier: Apache-2.0
"""Score, select and compact one layer's cache, when prompts end."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.scorers import ObservationWindowScorer
from vllm_pyramid.worker.retention import StepEvictions, as_int32
from vllm_pyramid.worker.trace import TraceWriter


def evict_layer(
    ops: ModuleType,
    policy: Policy,
    evictions: StepEvictions,
    layer: int,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    trace: TraceWriter | None,
) -> None:
    """Move the survivors of every prompt that ends in this step to the tail of its range.

    Runs after the layer's attention, so the prompt was attended to in full.

    Args:
        ops: a module with the functions of `ops/reference.py`.
        layer: index of the layer in the plans.
        query: `[T, H, D]` of the step, rotary embedding applied.
        key_cache: `[P, G, N, D]`. value_cache: same. block_table: `[>= R, M]` int32, unshifted.
        scale: softmax scale. soft_cap: of the logits, 0 for none.
    """
    helds = evictions.helds[layer]
    shortened = np.flatnonzero(helds < evictions.prompt_lens)
    if shortened.size == 0:
        return
    device = query.device
    rows = torch.from_numpy(evictions.rows[shortened]).to(device)
    tables = block_table.index_select(0, rows)
    host_lens, host_keeps = evictions.prompt_lens[shortened], helds[shortened]
    prompt_lens, keeps = as_int32(host_lens, device), as_int32(host_keeps, device)
    if policy.needs_scores:
        scorer = policy.scorer
        assert isinstance(scorer, ObservationWindowScorer)
        scores = ops.window_scores(
            query,
            key_cache,
            tables,
            as_int32(evictions.query_ends[shortened], device),
            prompt_lens,
            window=policy.window,
            scale=scale,
            soft_cap=soft_cap,
            gqa_reduce=scorer.gqa_reduce,
            pooling=scorer.pooling,
            kernel_size=scorer.kernel_size,
            max_prompt_len=int(host_lens.max()),
        )
        kept = ops.select(
            scores,
            prompt_lens,
            keeps,
            window=policy.window,
            sinks=policy.sinks,
            max_keep=int(host_keeps.max()),
        )
    else:
        kept = _positional(policy, host_lens, host_keeps, key_cache.shape[1]).to(device)
    ops.compact(
        key_cache, value_cache, tables, kept, prompt_lens, keeps, max_keep=int(host_keeps.max())
    )
    evictions.tokens_done[shortened] += host_lens - host_keeps
    if trace is not None:
        for index, positions in zip(shortened.tolist(), kept, strict=True):
            trace.record(evictions, index, layer, positions[:, : helds[index]])


def _positional(
    policy: Policy, prompt_lens: np.ndarray, keeps: np.ndarray, num_kv_heads: int
) -> torch.Tensor:
    """`select`'s result for a policy that looks at positions alone: `[E, G, max(keeps)]` int32."""
    kept = np.full((len(keeps), num_kv_heads, int(keeps.max())), -1, np.int32)
    for row, (prompt_len, keep) in enumerate(zip(prompt_lens, keeps, strict=True)):
        kept[row, :, :keep] = policy.kept_positions(int(prompt_len), int(keep))
    return torch.from_numpy(kept)
