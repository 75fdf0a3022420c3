# SPDX-License-Identifier: Apache-2.0
"""Score, select and compact one layer's cache, when prompts end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from vllm_pyramid.ops.recall import kept_mass
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.scorers import ObservationWindowScorer
from vllm_pyramid.worker.retention import StepEvictions
from vllm_pyramid.worker.trace import TraceWriter
from vllm_pyramid.worker.upload import upload

# Queries whose attention a trace reports on where the policy itself has no window: PyramidKV's 8.
RECALL_WINDOW = 8


@dataclass(frozen=True)
class DeviceEvictions:
    """Some of a step's ending prompts, S of them, where the attention is.

    Attributes:
        rows: `[S]` int64, their rows of the batch. query_ends, prompt_lens: `[S]` int32.
        keeps: `[L, S]` int32, tokens that stay in each layer.
    """

    rows: torch.Tensor
    query_ends: torch.Tensor
    prompt_lens: torch.Tensor
    keeps: torch.Tensor


class EvictionUploads:
    """What a step's evictions need on the device: copied once a step, not once a layer.

    Layers mostly shorten the same prompts; each set of prompts that some layer shortens is copied
    when the first such layer asks for it. Shared by all layers.
    """

    def __init__(self) -> None:
        self._evictions: StepEvictions | None = None
        self._sets: dict[bytes, DeviceEvictions] = {}

    def get(
        self, evictions: StepEvictions, chosen: np.ndarray, device: torch.device
    ) -> DeviceEvictions:
        """The prompts with the indices `chosen`, `[S]` int64, of the step's `evictions`."""
        if evictions is not self._evictions:
            self._evictions = evictions
            self._sets = {}
        key = chosen.tobytes()
        if key not in self._sets:
            self._sets[key] = DeviceEvictions(
                rows=upload(evictions.rows[chosen], device),
                query_ends=upload(evictions.query_ends[chosen], device),
                prompt_lens=upload(evictions.prompt_lens[chosen], device),
                keeps=upload(np.ascontiguousarray(evictions.helds[:, chosen]), device),
            )
        return self._sets[key]


def evict_layer(
    ops: ModuleType,
    policy: Policy,
    evictions: StepEvictions,
    uploads: EvictionUploads,
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
        uploads: of the runner, for all layers. layer: index of the layer in the plans.
        query: `[T, H, D]` of the step, rotary embedding applied.
        key_cache: `[P, G, N, D]`. value_cache: same. block_table: `[>= R, M]` int32, unshifted.
        scale: softmax scale. soft_cap: of the logits, 0 for none.
    """
    helds = evictions.helds[layer]
    shortened = np.flatnonzero(helds < evictions.prompt_lens)
    if shortened.size == 0:
        return
    host_lens, host_keeps = evictions.prompt_lens[shortened], helds[shortened]
    max_keep = int(host_keeps.max())
    device = uploads.get(evictions, shortened, query.device)
    tables = block_table.index_select(0, device.rows)
    keeps = device.keeps[layer]
    if policy.needs_scores:
        scorer = policy.scorer
        assert isinstance(scorer, ObservationWindowScorer)
        scores = ops.window_scores(
            query,
            key_cache,
            tables,
            device.query_ends,
            device.prompt_lens,
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
            device.prompt_lens,
            keeps,
            window=policy.window,
            sinks=policy.sinks,
            max_keep=max_keep,
        )
    else:
        positions = _positional(policy, host_lens, host_keeps, key_cache.shape[1])
        kept = upload(positions, query.device)
    if trace is not None:
        recalls = _attention_recall(
            ops, policy, evictions, shortened, device, keeps, kept, query, key_cache, tables,
            scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        for index, positions, recall in zip(shortened.tolist(), kept, recalls, strict=True):
            trace.record(evictions, index, layer, positions[:, : helds[index]], recall)
    ops.compact(key_cache, value_cache, tables, kept, device.prompt_lens, keeps, max_keep=max_keep)
    evictions.tokens_done[shortened] += host_lens - host_keeps


def _attention_recall(
    ops: ModuleType,
    policy: Policy,
    evictions: StepEvictions,
    shortened: np.ndarray,
    device: DeviceEvictions,
    keeps: torch.Tensor,
    kept: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    tables: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """What the kept tokens hold of the window's attention, `[S, G]` float32 on the host.

    See `recall.kept_mass`. A policy without a window takes the last `RECALL_WINDOW`
    queries. NaN for a prompt whose last chunk had fewer queries, which only such a policy allows.
    """
    window = policy.window or RECALL_WINDOW
    result = torch.full((len(shortened), key_cache.shape[1]), math.nan)
    enough = np.flatnonzero(
        (evictions.query_lens[shortened] >= window) & (evictions.prompt_lens[shortened] > window)
    )
    if enough.size:
        rows = upload(enough.astype(np.int64), query.device)
        prompt_lens = device.prompt_lens[rows]
        mass = ops.window_scores(
            query,
            key_cache,
            tables[rows],
            device.query_ends[rows],
            prompt_lens,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            gqa_reduce="mean",
            pooling="none",
            kernel_size=1,
            max_prompt_len=int(evictions.prompt_lens[shortened][enough].max()),
        )
        share = kept_mass(mass, kept[rows], prompt_lens, keeps[rows], window=window)
        result[torch.from_numpy(enough)] = share.cpu()
    return result


def _positional(
    policy: Policy, prompt_lens: np.ndarray, keeps: np.ndarray, num_kv_heads: int
) -> np.ndarray:
    """`select`'s result for a policy that looks at positions alone: `[S, G, max(keeps)]` int32."""
    kept = np.full((len(keeps), num_kv_heads, int(keeps.max())), -1, np.int32)
    for row, (prompt_len, keep) in enumerate(zip(prompt_lens, keeps, strict=True)):
        kept[row, :, :keep] = policy.kept_positions(int(prompt_len), int(keep))
    return kept
