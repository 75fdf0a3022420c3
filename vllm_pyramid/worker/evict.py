# SPDX-License-Identifier: Apache-2.0
"""Score, select and compact one layer's cache, when prompts end."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from vllm_pyramid.ops.recall import WindowStatistics
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.scorers import ObservationWindowScorer
from vllm_pyramid.worker.retention import StepEvictions
from vllm_pyramid.worker.trace import TraceWriter
from vllm_pyramid.worker.upload import DeviceEvictions, upload
from vllm_pyramid.worker.window_mass import window_mass


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

    Runs after the layer's attention, so the prompt was attended to in full. Prompts whose
    lengths are solved still hold everything here; they give in all layers together (`solve.py`).

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
        scores, _ = score(
            ops,
            policy,
            device,
            query,
            key_cache,
            tables,
            scale=scale,
            soft_cap=soft_cap,
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
        mass = window_mass(
            ops, policy, evictions, shortened, device, query, key_cache, tables,
            scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        recalls = mass.recall(kept, device.prompt_lens, keeps)
        for index, positions, recall in zip(shortened.tolist(), kept, recalls, strict=True):
            trace.record(evictions, index, layer, positions[:, : helds[index]], recall)
    ops.compact(key_cache, value_cache, tables, kept, device.prompt_lens, keeps, max_keep=max_keep)
    evictions.tokens_done[shortened] += host_lens - host_keeps


def score(
    ops: ModuleType,
    policy: Policy,
    device: DeviceEvictions,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    tables: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    max_prompt_len: int,
    statistics: bool = False,
) -> tuple[torch.Tensor, WindowStatistics | None]:
    """`window_scores` of the prompts in `device` with the policy's settings."""
    scorer = policy.scorer
    assert isinstance(scorer, ObservationWindowScorer)
    result = ops.window_scores(
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
        max_prompt_len=max_prompt_len,
        statistics=statistics,
    )
    return result if statistics else (result, None)


def _positional(
    policy: Policy, prompt_lens: np.ndarray, keeps: np.ndarray, num_kv_heads: int
) -> np.ndarray:
    """`select`'s result for a policy that looks at positions alone: `[S, G, max(keeps)]` int32."""
    kept = np.full((len(keeps), num_kv_heads, int(keeps.max())), -1, np.int32)
    for row, (prompt_len, keep) in enumerate(zip(prompt_lens, keeps, strict=True)):
        kept[row, :, :keep] = policy.kept_positions(int(prompt_len), int(keep))
    return kept
