# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's KV cache groups are the layers that evict."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.layer_manager import LayerKVCacheManager
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec


class LayerGroups(NamedTuple):
    """The layers that evict, from the bottom, each with its group; and the other groups.

    Attributes:
        managers: of the layers. specs: of the layers. groups: their groups' numbers.
        recording: layer and manager of those that note the ids of new blocks, to have them zeroed.
        others: number and manager of each group that does not evict.
    """

    managers: tuple[LayerKVCacheManager, ...]
    specs: list[LayerKVCacheSpec]
    groups: list[int]
    recording: list[tuple[int, LayerKVCacheManager]]
    others: list[tuple[int, SingleTypeKVCacheManager]]

    @classmethod
    def of(cls, managers: Sequence[SingleTypeKVCacheManager]) -> LayerGroups:
        """Sort the managers of all groups."""
        own, others = [], []
        for group, manager in enumerate(managers):
            spec = manager.kv_cache_spec
            if isinstance(manager, LayerKVCacheManager) and isinstance(spec, LayerKVCacheSpec):
                own.append((spec, group, manager))
            else:
                others.append((group, manager))
        own.sort(key=lambda layer: layer[0].layer_idx)
        specs, groups = [spec for spec, _, _ in own], [group for _, group, _ in own]
        assert [spec.layer_idx for spec in specs] == list(range(len(own))), "layers are missing"
        if not others:  # blocks of layers are then given out as those of groups
            assert groups == list(range(len(own))), "groups are not in the order of layers"
        sorted_managers = tuple(manager for _, _, manager in own)
        recording = [
            (layer, manager)
            for layer, manager in enumerate(sorted_managers)
            if manager.records_new_block_ids
        ]
        return cls(sorted_managers, specs, groups, recording, others)

    @property
    def lanes(self) -> int:
        """Return how many block tables of KV heads each layer has, the same in all; 1: none."""
        return self.specs[0].lanes

    @property
    def layers(self) -> list[int]:
        """Return the model's own numbers of the layers."""
        return [spec.model_layer for spec in self.specs]

    def block_counts(self, stages: PipelineLayout, stock_sizes: Sequence[int]) -> LayerBlocks:
        """Return how many blocks the layers need.

        Args:
            stock_sizes: tokens of a block in each group of vLLM's own.
        """
        sizes, full_size = [spec.block_size for spec in self.specs], self.specs[0].full_block_size
        return LayerBlocks(sizes, stages, full_size, stock_sizes, self.lanes)

    def prefix_caches(
        self, pool: BundlePool, layer_blocks: LayerBlocks, hash_block_size: int
    ) -> tuple[PrefixCache, ...]:
        """Return the prefix cache of all lanes, or that of the lanes that evict and the others'."""
        make = partial(PrefixCache, pool, self.managers, layer_blocks, hash_block_size)
        whole = np.concatenate([spec.whole or (False,) * spec.lanes for spec in self.specs])
        if whole.all() or not whole.any():
            return (make(),)
        return make(~whole), make(whole, b"whole", to_end=True)

    def of_lanes(
        self, new_blocks: Sequence[Sequence[KVCacheBlock]]
    ) -> list[Sequence[KVCacheBlock]]:
        """Return the layers' blocks of `[groups][blocks]`, `[layers * lanes][blocks]`.

        New blocks of a layer are the next of its lanes in turn.
        """
        lanes = self.lanes
        return [new_blocks[group][lane::lanes] for group in self.groups for lane in range(lanes)]

    def blocks_held(self, request_id: str) -> list[int]:
        """Count the blocks of the pool in a request's tables, `[layers * lanes]`."""
        lanes = self.lanes
        return [
            manager.num_held(request_id, lane, lanes)
            for manager in self.managers
            for lane in range(lanes)
        ]

    def tables_of(self, request_id: str) -> list[list[KVCacheBlock]]:
        """Return the tables of a request in the layers' managers, `[layers]`."""
        return [manager.req_to_blocks[request_id] for manager in self.managers]

    def release_heads(self, request_id: str, heads: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Give back the first `heads` blocks of a request's tables, `[layers * lanes]`.

        Returns:
            How many blocks went back to the pool, `[layers * lanes]`.
        """
        if (lanes := self.lanes) > 1:
            by_layer = heads.reshape(-1, lanes).tolist()
            return np.array(
                [
                    manager.release_lanes(request_id, of_layer)
                    for manager, of_layer in zip(self.managers, by_layer, strict=True)
                ],
                np.int64,
            ).ravel()
        released = [
            manager.release_head(request_id, head)
            for manager, head in zip(self.managers, heads.tolist(), strict=True)
        ]
        return np.array(released, np.int64)
