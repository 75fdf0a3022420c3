# SPDX-License-Identifier: Apache-2.0
"""What the CPU back end knows of a step: one layer's table, lengths and skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class PyramidCpuMetadata(AttentionMetadata):
    """One layer's view of a step.

    Attributes:
        block_table: `[R, M]` int32. query_start_loc: `[R + 1]` int32. seq_lens: `[R]` int32.
        skips: `[R]` int32, tokens below which the layer's table is not valid.
    """

    num_tokens: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor


class _Context(Protocol):
    """A layer's (`LayerContext`)."""

    def cpu_metadata(self, common: CommonAttentionMetadata) -> PyramidCpuMetadata: ...


class PyramidCpuMetadataBuilder(AttentionMetadataBuilder[PyramidCpuMetadata]):
    """Asks each layer's context, which the model runner sets, for its part of the step."""

    reads_shifted_tables = False
    context: _Context | None = None

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
        if self.context is not None:
            return self.context.cpu_metadata(common)
        num_reqs = common.num_reqs
        if len(self._no_skips) < num_reqs:  # chunks of requests count as requests of their own
            self._no_skips = torch.zeros(2 * num_reqs, dtype=torch.int32)
        return PyramidCpuMetadata(
            num_tokens=common.num_actual_tokens,
            block_table=common.block_table_tensor,
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            seq_lens=common.seq_lens[:num_reqs],
            skips=self._no_skips[:num_reqs],
        )


def check_size(num_reqs: int, of_skips: int) -> None:
    """Raise RuntimeError unless the step's skips are those of vLLM's batch."""
    if of_skips != num_reqs:
        raise RuntimeError(
            f"a step of {num_reqs} requests has skips of {of_skips}: vLLM's batch and "
            "the runtime's differ; report this"
        )
