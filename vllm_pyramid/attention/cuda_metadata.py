# SPDX-License-Identifier: Apache-2.0
"""What the layers of a step read on CUDA devices: stock metadata over each layer's own table."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.policy.planning import can_evict_after
from vllm_pyramid.policy.served_settings import ServedSettings


def tables_per_layer(kv_cache_spec: Any) -> int:
    """Return the tables of a layer, each of which its attention reads as a request's."""
    found: int = getattr(kv_cache_spec, "tables_per_layer", 1)
    return found


class PyramidBuilderMixin:
    """Goes in front of a stock builder, and hands it the layer's shifted table and length.

    Attributes:
        reads_shifted_tables: the stock kernels know nothing of skips (see `shifted_tables.py`).
        context: set by the model runner for layers that evict; other layers read vLLM's tables.
    """

    supports_update_block_table = False
    reads_shifted_tables = True
    context: LayerContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_replays: dict[tuple[int, int], Any] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which steps may be graphs: decode steps of one token, or of one and its drafts.

        An eviction is Python, which a graph leaves out. None at all where a policy works in every
        step, or attends by its own code on the host. With drafts a short prompt might look like a
        decode step, and must be one that is not evicted.
        """
        settings = ServedSettings.of(vllm_config)
        one = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if settings is None:
            return one
        policy = settings.policy
        if policy.works_in_every_step or (
            policy.attends
            and policy.excludes_graphs(vllm_config.parallel_config.pipeline_parallel_size)
        ):
            return AttentionCGSupport.NEVER
        if not settings.num_drafts:
            return one
        stock: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        layers = getattr(kv_cache_spec, "num_layers", None)  # None: it never evicts
        if layers is not None and can_evict_after(
            settings.policy, settings.num_drafts + 1, layers, kv_cache_spec.block_size
        ):
            return one
        return min(stock, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Return the stock metadata over this layer's table.

        `fast_build` leaves out FlashAttention's ahead-of-time schedule, which would be computed
        once a layer.
        """
        context = self.context
        if context is None:  # a layer that does not evict
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
            metadata.kv_step = None
            return metadata
        assert context.shifted is not None, "the layer was not bound"
        shifted = context.shifted
        shape = common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens
        if shifted.replays and shape in self._of_replays:
            return self._of_replays[shape]
        common = copy.copy(common_attn_metadata)
        shifted.describe(common, context.layer)
        if (layout := context.step.layout) is not None:
            starts = layout.query_starts[context.layer]
            common.query_start_loc = layout.starts_on(context.layer, common.seq_lens.device)
            common.query_start_loc_cpu = torch.from_numpy(starts)
            common.num_actual_tokens = int(starts[-1])
            common.max_query_len = int((starts[1:] - starts[:-1]).max())
        metadata = super().build(common_prefix_len, common, fast_build=True)  # type: ignore[misc]
        metadata.kv_step = context.step
        shifted.complete(metadata, common, context.layer)
        if shifted.replays:
            # The graph reads the tensors that it was captured with; what is built for its step is
            # not read.
            self._of_replays[shape] = metadata
        return metadata
