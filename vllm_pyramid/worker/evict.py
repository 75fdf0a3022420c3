# SPDX-License-Identifier: Apache-2.0
"""Score, select and compact one layer's cache, when requests come to an eviction."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from vllm_pyramid.ops.recall import WindowStatistics
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.plans import RetentionPlan
from vllm_pyramid.policy.scorers import ObservationWindowScorer
from vllm_pyramid.worker.key_mass import KeyMass
from vllm_pyramid.worker.step import StepEvictions
from vllm_pyramid.worker.trace import TraceWriter
from vllm_pyramid.worker.upload import DeviceEvictions, upload
from vllm_pyramid.worker.window_mass import window_mass


class EvictionUploads:
    """What a step's evictions need on the device: copied once a step, not once a layer.

    Layers mostly shorten the same prompts; each set of prompts that some layer shortens is copied
    when the first such layer asks for it. Shared by all layers.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
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
            befores = np.ascontiguousarray(evictions.befores[:, chosen])
            prompt_lens = evictions.prompt_lens[chosen]
            firsts = befores // self._block_size
            self._sets[key] = DeviceEvictions(
                rows=upload(evictions.rows[chosen], device),
                query_ends=upload(evictions.query_ends[chosen], device),
                prompt_lens=upload(prompt_lens, device),
                keeps=upload(np.ascontiguousarray(evictions.helds[:, chosen]), device),
                firsts=upload(firsts.astype(np.int64), device) if firsts.any() else None,
                lens=upload(prompt_lens - firsts * self._block_size, device),
                deads=upload(befores - firsts * self._block_size, device),
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
    mass: KeyMass | None = None,
    shifted: bool = False,
) -> None:
    """Move the survivors of every request that evicts in this step to the tail of its range.

    Runs after the layer's attention, so the prompt was attended to in full. Prompts whose
    lengths are solved still hold everything here; they give in all layers together (`solve.py`).

    Args:
        ops: a module with the functions of `ops/reference.py`.
        uploads: of the runner, for all layers. layer: index of the layer in the plans.
        query: `[T, H, D]` of the step, rotary embedding applied.
        key_cache: `[P, G, N, D]`. value_cache: same. block_table: `[>= R, M]` int32.
        scale: softmax scale. soft_cap: of the logits, 0 for none.
        mass: what policies that accumulate have gathered, this step included.
        shifted: the rows of the block table begin with the first block that the layer holds.
    """
    shortened = evictions.chosen(layer)
    if shortened.size == 0:
        return
    held, before = evictions.helds[layer, shortened], evictions.befores[layer, shortened]
    visible = evictions.prompt_lens[shortened] - before
    max_keep = int(held.max())
    device = uploads.get(evictions, shortened, query.device)
    tables = device.tables(block_table, layer, shifted)
    block_size = key_cache.shape[2]
    dead = before % block_size
    lens, keeps = device.lens[layer], device.keeps[layer]
    if mass is not None:
        entries = -(-int((visible + dead).max()) // block_size)
        kept = mass.select(
            ops,
            [evictions.plans[index] for index in shortened],
            layer,
            tables[:, :entries],
            lens,
            device.deads[layer],
            keeps,
            max_keep=max_keep,
        )
    elif policy.needs_scores:
        scores, _ = score(
            ops,
            policy,
            device,
            query,
            key_cache,
            tables,
            scale=scale,
            soft_cap=soft_cap,
            max_prompt_len=int(visible.max()),
        )
        kept = ops.select(
            scores, lens, keeps, window=policy.window, sinks=policy.sinks, max_keep=max_keep
        )
    else:
        plans = [evictions.plans[index] for index in shortened]
        fronts = [plan.front[layer] for plan in plans if isinstance(plan, RetentionPlan)]
        positions = _positional(policy, fronts, visible, held, dead, key_cache.shape[1])
        kept = upload(positions, query.device)
    if trace is not None:
        window = window_mass(
            ops, policy, evictions, shortened, device, query, key_cache, tables,
            scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        recalls = window.recall(kept, lens, keeps)
        places = kept - device.deads[layer][:, None, None]
        for row, index in enumerate(shortened.tolist()):
            trace.record(evictions, index, layer, places[row, :, : held[row]], recalls[row])
    ops.compact(key_cache, value_cache, tables, kept, lens, keeps, max_keep=max_keep)
    if mass is not None:
        mass.move(tables, kept, lens, keeps)
    evictions.tokens_done[shortened] += visible - held


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
    policy: Policy,
    fronts: Sequence[int],
    visible: np.ndarray,
    keeps: np.ndarray,
    deads: np.ndarray,
    num_kv_heads: int,
) -> np.ndarray:
    """`select`'s result for a policy that looks at positions alone: `[S, G, max(keeps)]` int32."""
    kept = np.full((len(keeps), num_kv_heads, int(keeps.max())), -1, np.int32)
    rows = zip(fronts, visible, keeps, deads, strict=True)
    for row, (front, length, keep, dead) in enumerate(rows):
        kept[row, :, :keep] = dead + policy.kept_positions(int(length), int(keep), int(front))
    return kept
