# SPDX-License-Identifier: Apache-2.0
"""The layers of a worker: which of them evict, and the KV cache specs of all."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

from vllm_pyramid.attention.per_head.layout import layout_of
from vllm_pyramid.attention.table_layout import TableLayout
from vllm_pyramid.compat.drafts import draft_layers
from vllm_pyramid.kv_cache.layer_roles import LayerRoles, roles_of
from vllm_pyramid.policy.capabilities import Feature, asked, refuse
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.worker.pipeline_sync import PipelineSync


@dataclass(frozen=True)
class WorkerLayers(LayerRoles):
    """The layers of one worker, and what it must know of those of other pipeline stages.

    Layers that evict are numbered from the bottom of the model, across all stages.

    Attributes:
        stage: the numbers of this worker's layers that evict.
        model_layers: the model's own number of each layer that evicts, of all stages.
        block_size: tokens of the largest block; multiples of it end blocks in all layers.
        layout: which block tables the layers read.
    """

    stage: slice
    model_layers: list[int]
    block_size: int
    layout: TableLayout

    @classmethod
    def collect(
        cls,
        config: VllmConfig,
        model: torch.nn.Module,
        policy: Policy,
        stock: Mapping[str, KVCacheSpec],
        pipeline: PipelineSync,
    ) -> Self:
        """Assign roles to the layers of all pipeline stages; all workers call it at the same time.

        Args:
            model: the target model. stock: vLLM's spec of each of this worker's layers.

        Raises:
            ValueError: the policy cannot serve a model with these layers.
        """
        readers = get_shared_kv_cache_layers(config)
        stages = pipeline.layers_of_all(stock, readers)
        drafts = draft_layers(config, model, {*stock, *readers})
        roles = roles_of(
            dict(ChainMap(*(dict(layers) for layers, _ in stages))),
            policy,
            config.model_config.max_model_len,
            dict(ChainMap(*(dict(readers) for _, readers in stages))),
            [layers.keys() for layers, _ in stages] if pipeline.count > 1 else (),
            drafts,
        )
        if roles.stock_groups.keys() - drafts or roles.readers:
            refuse(policy, asked(Feature.OTHER_LAYERS))
        policy.check_layers(sum(spec.tables_per_layer for spec in roles.evicting.values()))
        own = roles.of_stage(stock)
        layers = [spec.layer_idx for spec in own.evicting.values()]
        return cls(
            *(own.evicting, own.stock_groups, own.readers),
            stage=slice(layers[0], layers[-1] + 1),
            model_layers=[spec.model_layer for spec in roles.evicting.values()],
            block_size=max(spec.block_size for spec in roles.evicting.values()),
            layout=layout_of(list(roles.evicting.values())),
        )

    @property
    def num_layers(self) -> int:
        """The number of layers that evict, of all stages."""
        return len(self.model_layers)

    @property
    def tables_per_layer(self) -> int:
        """The block tables of each layer, as plans count them."""
        return self.layout.tables_per_layer

    @property
    def num_tables(self) -> int:
        """The numbers that a plan has: one for each table of the layers that evict."""
        return self.num_layers * self.tables_per_layer

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a block, the same in all layers that evict."""
        return next(iter(self.evicting.values())).page_size_bytes
