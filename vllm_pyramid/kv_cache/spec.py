# SPDX-License-Identifier: Apache-2.0
"""The KV cache spec of one layer, and how it is registered with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_pyramid.compat.cache_specs import register_stock_specs, return_head
from vllm_pyramid.kv_cache.bundles import BundlePool
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout
from vllm_pyramid.policy.planning import peak_blocks_up_to
from vllm_pyramid.policy.served_settings import ServedSettings


class LayerKVCacheManager(FullAttentionManager):
    """The blocks of one layer for every request; `LockstepCoordinator` decides when they change.

    To vLLM it is a full-attention manager without prefix caching. It can give back the head of a
    request's blocks, as a sliding window does. Blocks come from the pool of the layer's stage.

        before   [b0][b1][b2][b3][b4]      after release_head(rid, 3)   [null][null][null][b3][b4]
    """

    def __init__(self, kv_cache_spec: Any, block_pool: BundlePool, **kwargs: Any) -> None:
        own = block_pool.of_layer(kv_cache_spec.layer_idx)
        super().__init__(kv_cache_spec, block_pool=own, **kwargs)

    def release_head(self, request_id: str, num_blocks: int) -> int:
        """Return a request's first blocks to the pool, and how many went back; 0 if they had gone
        before.

        Null blocks keep their places in the table, so token p is still in entry p // block size.
        """
        before = self.block_pool.get_num_free_blocks()
        return_head(self, request_id, num_blocks)
        return self.block_pool.get_num_free_blocks() - before


@dataclass(frozen=True, kw_only=True)
class LayerKVCacheSpec(FullAttentionSpec):
    """Full attention whose blocks belong to one layer alone.

    Layers of this spec never share a KV cache group, so each has its own block table; their pages
    have one size and come from one pool.

    Attributes:
        layer_idx: from the bottom, among the `num_layers` layers that evict.
        model_layer: the model's own number of it.
        stages: layers that evict in each pipeline stage; empty: there is one stage.
    """

    layer_idx: int
    num_layers: int
    model_layer: int
    stages: tuple[int, ...] = ()

    @property
    def tables_per_layer(self) -> int:
        """Block tables in vLLM's one of this layer: what `kv_cache/layout.py` calls tables."""
        return 1

    def pipeline(self) -> PipelineLayout:
        """Return which tables each pipeline stage has; one stage if `stages` names none."""
        ends = np.cumsum(self.stages or (self.num_layers,)) * self.tables_per_layer
        return PipelineLayout(tuple(ends.tolist()), self.tables_per_layer)

    @property
    def full_block_size(self) -> int:
        """Tokens of a page that holds K and V: what `full` fits into one of this layer's pages."""
        return self.block_size

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return what the longest prompt takes of this layer when all layers together hold most.

        That is all of it, where nothing is evicted before its end. vLLM's check at start-up, the
        length that fits and the concurrency that it prints go by this.

        vLLM adds up what all layers say, for each worker. Pipeline stages have pools of their own,
        so the sum must be that of the stage that needs most, and the layers of the others say
        nothing.
        """
        settings = ServedSettings.of(vllm_config)
        if not self.stages and (settings is None or settings.policy.inner_policy is None):
            return self.tables_per_layer * super().max_memory_usage_bytes(vllm_config)
        assert settings is not None, "stages are of an engine with a policy"
        longest, per_layer = vllm_config.model_config.max_model_len, self.tables_per_layer
        stages = self.pipeline()
        blocks = peak_blocks_up_to(
            *(settings.policy, longest, self.num_layers * per_layer),
            *(self.full_block_size, stages.sizes),
        )
        if stages.of_table(self.layer_idx * per_layer) != int(stages.sums(blocks).argmax()):
            return 0
        of_layer = blocks.reshape(-1, per_layer)[self.layer_idx]
        return int(of_layer.sum()) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge one spec only; vLLM keeps layers apart on an AssertionError ("not uniform")."""
        if len(specs) != 1:
            raise AssertionError("layers with their own KV budget do not share a block table")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Never, unless it is the only one: "uniform" layers are put into one group."""
        return len(kv_cache_specs) == 1


@dataclass(frozen=True, kw_only=True)
class KeyOnlyKVCacheSpec(LayerKVCacheSpec):
    """A layer of which the device holds K alone; V is in host memory.

    Its blocks have twice the tokens of those with V, `head_size_v` is 0, and so a page has the same
    bytes and comes from the same pool.
    """

    @classmethod
    def of(cls, spec: LayerKVCacheSpec) -> Self:
        """Return the spec of the same layer without V on the device."""
        assert spec.head_size_v == spec.head_size, "K and V of one size"
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
        own = cls(**values | {"block_size": 2 * spec.block_size, "head_size_v": 0})
        assert own.page_size_bytes == spec.page_size_bytes, (own, spec)
        return own

    @property
    def full_block_size(self) -> int:
        return self.block_size // 2


def register_spec(*specs: type[LayerKVCacheSpec]) -> None:
    """Make specs of layers known in this process. Idempotent.

    Called when this module is imported: a worker imports it to make specs, the engine core by
    unpickling them. vLLM registers its own specs only if the registry is still empty, so they go
    first.
    """
    register_stock_specs()
    for spec in specs:
        KVCacheSpecRegistry.register(
            spec, manager_class=LayerKVCacheManager, uniform_type_base_spec=LayerKVCacheSpec
        )


register_spec(LayerKVCacheSpec, KeyOnlyKVCacheSpec)


@dataclass(frozen=True)
class HostSlots:
    """The slots of the host cache; a slot takes a block of each layer of a worker.

    What methods keep beside a block (`BlockExtras`) goes with it, behind its bytes.

    Attributes:
        count: number of slots, the same in all workers.
        num_bytes: of one slot in the memory of the worker that has the given layers.
        block_bytes: of one block, with what is beside it.
    """

    count: int
    num_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, num_bytes: int, specs: Sequence[LayerKVCacheSpec], extra_bytes: int = 0) -> Self:
        """Return the slots that fit into `num_bytes`; scheduler and workers both ask.

        Args:
            num_bytes: of a tensor-parallel rank, all pipeline stages together.
            specs: of the layers that evict: all, or those of one stage. Their pages have one size.
            extra_bytes: beside each block, see `Policy.extra_bytes`.

        Raises:
            ValueError: not a single slot fits.
        """
        page = specs[0].page_size_bytes + extra_bytes
        of_slot = page * specs[0].num_layers
        if num_bytes < of_slot:
            raise ValueError(
                f"--kv-host-cache is too small: a rank's share of it is {num_bytes / 2**20:.3g} "
                f"MiB, and the blocks of all layers at one position take {of_slot / 2**20:.3g} "
                "MiB; raise it"
            )
        return cls(num_bytes // of_slot, page * len(specs), page)


def stages_of(config: KVCacheConfig) -> PipelineLayout:
    """Return which tables of evicting layers each pipeline stage has."""
    specs = (group.kv_cache_spec for group in config.kv_cache_groups)
    return next(spec for spec in specs if isinstance(spec, LayerKVCacheSpec)).pipeline()
