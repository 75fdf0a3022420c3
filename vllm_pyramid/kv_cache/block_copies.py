# SPDX-License-Identifier: Apache-2.0
"""Block copies that the workers make before the step that is being scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy

from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout


class BlockCopies:
    """The copies of one step, per pipeline stage.

    A worker makes a step's copies in order and before it writes anything else, so the pool may give
    the sources to requests that are admitted later in the step.
    """

    def __init__(self, stages: PipelineLayout) -> None:
        self._bounds = list(zip(stages.starts, stages.ends, strict=True))
        self._by_stage: list[list[KVCacheBlockCopy]] = [[] for _ in self._bounds]

    def add(
        self, sources: Sequence[Sequence[KVCacheBlock]], targets: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        """Copy blocks of the evicting layers, both arguments `[layers][blocks]`."""
        for copies, (start, end) in zip(self._by_stage, self._bounds, strict=True):
            copies += _copies(sources[start:end], targets[start:end])

    def add_stock(
        self, sources: Sequence[Sequence[KVCacheBlock]], targets: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        """Copy blocks of vLLM's own groups, which exist with one stage only."""
        self._by_stage[0] += _copies(sources, targets)

    def take(self) -> list[list[KVCacheBlockCopy]]:
        """Return the copies of the step that has just been scheduled, and begin with none."""
        copies, self._by_stage = self._by_stage, [[] for _ in self._bounds]
        return copies


def _copies(
    sources: Sequence[Sequence[KVCacheBlock]], targets: Sequence[Sequence[KVCacheBlock]]
) -> list[KVCacheBlockCopy]:
    pairs = zip(chain.from_iterable(sources), chain.from_iterable(targets), strict=True)
    return [KVCacheBlockCopy(source.block_id, target.block_id) for source, target in pairs]
