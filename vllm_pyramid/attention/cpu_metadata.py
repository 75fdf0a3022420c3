# SPDX-License-Identifier: Apache-2.0
"""What the CPU back end knows of a step: one layer's table, lengths and skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_pyramid.attention.head_lanes import HeadLanes
from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.step.step import Step


@dataclass
class PyramidCpuMetadata(AttentionMetadata):
    """One layer's view of a step.

    Attributes:
        block_table: `[R, M]` int32. query_start_loc: `[R + 1]` int32. seq_lens: `[R]` int32.
        skips: `[R]` int32, tokens below which the layer's table is not valid.
        slots: where KV heads have block tables of their own, `[T * G]` int64, the slots of the
            step's tokens and heads; R is then the number of lanes (`HeadLanes`).
    """

    num_tokens: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor
    slots: torch.Tensor | None = None


class PyramidCpuMetadataBuilder(AttentionMetadataBuilder[PyramidCpuMetadata]):
    """Slices the step's skips by layer; they were computed once for all layers.

    Attributes:
        context: set by the model runner; None for layers that do not evict.
    """

    reads_shifted_tables = False
    context: LayerContext | None = None

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._no_skips = torch.zeros(0, dtype=torch.int32)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PyramidCpuMetadata:
        """Return the metadata of this builder's layers for the current step."""
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("vllm-pyramid's CPU attention is causal; this model is not")
        if common.mm_req_doc_ranges:
            raise ValueError("vllm-pyramid's CPU attention is causal; these images are not")
        num_reqs = common.num_reqs
        if len(self._no_skips) < num_reqs:  # chunks of requests count as requests of their own
            self._no_skips = torch.zeros(2 * num_reqs, dtype=torch.int32)
        skips = self._no_skips[:num_reqs]
        if self.context is not None:
            step, layer = self.context.step, self.context.layer
            if (lanes := self.context.lanes) is not None:
                return _metadata_of_lanes(lanes, step, layer, common)
            if (layout := step.layout) is not None:
                return PyramidCpuMetadata(
                    num_tokens=int(layout.query_starts[layer, -1]),
                    block_table=common.block_table_tensor,
                    query_start_loc=torch.from_numpy(layout.query_starts[layer]),
                    seq_lens=torch.from_numpy(layout.seq_lens[layer]),
                    skips=torch.from_numpy(layout.skips[layer]),
                )
            skips = torch.from_numpy(step.skips[layer])
            _check_size(num_reqs, skips.numel())
        return PyramidCpuMetadata(
            num_tokens=common.num_actual_tokens,
            block_table=common.block_table_tensor,
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            seq_lens=common.seq_lens[:num_reqs],
            skips=skips,
        )


def _metadata_of_lanes(
    lanes: HeadLanes, step: Step, layer: int, common: CommonAttentionMetadata
) -> PyramidCpuMetadata:
    """Return the metadata of a layer whose KV heads have block tables of their own."""
    num_reqs, first = common.num_reqs, layer * lanes.count
    skips = torch.from_numpy(step.skips[first : first + lanes.count])
    _check_size(num_reqs, skips.shape[1])
    shared = lanes.of_step(
        step,
        common.query_start_loc[: num_reqs + 1],
        common.seq_lens[:num_reqs],
        common.max_seq_len,
    )
    return PyramidCpuMetadata(
        num_tokens=common.num_actual_tokens,
        block_table=lanes.tables(shared, common.block_table_tensor),
        query_start_loc=shared.query_starts,
        seq_lens=shared.seq_lens,
        skips=skips.T.flatten(),
        slots=lanes.slots(shared, common.block_table_tensor),
    )


def _check_size(num_reqs: int, of_skips: int) -> None:
    """Raise RuntimeError unless the step's skips are those of vLLM's batch."""
    if of_skips != num_reqs:
        raise RuntimeError(
            f"a step of {num_reqs} requests has skips of {of_skips}: vLLM's batch and "
            "the runtime's differ; report this"
        )


def lane_slots(layer: Any) -> torch.Tensor:
    """Return the slots of the step in a layer whose KV heads have block tables of their own."""
    found: Any = get_forward_context().attn_metadata
    slots: torch.Tensor | None = found[layer.layer_name].slots
    assert slots is not None, "the layer's metadata are those of lanes"
    return slots
