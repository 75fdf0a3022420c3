# SPDX-License-Identifier: Apache-2.0
"""FlashAttention with a table per layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_pyramid.attention.backend_cuda import PyramidImplMixin, metadata_of
from vllm_pyramid.attention.cuda_metadata import PyramidBuilderMixin, tables_per_layer
from vllm_pyramid.attention.head_lists import head_names, view_of_heads
from vllm_pyramid.step.attention_inputs import AttentionInputs, HeadNames


class PyramidFlashBuilder(PyramidBuilderMixin, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata over a layer's own table."""

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        """Limit the parts of a row in graphs as vLLM does: by the step's tokens, not by tables."""
        super().__init__(kv_cache_spec, *args, **kwargs)
        if self.max_cudagraph_size is not None:
            self.max_cudagraph_size *= tables_per_layer(kv_cache_spec)


class PyramidFlashImpl(PyramidImplMixin, FlashAttentionImpl):
    """FlashAttention, with hooks and evictions behind it."""

    def attend_to_lists(
        self,
        layer: Any,
        attended: AttentionInputs,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Attend by FlashAttention, to each KV head as a request.

        Our kernel attends where lists do not have the names of heads, and where a row has several
        queries, whose heads lie between one another.
        """
        requests = attended.head_requests
        if requests is None:
            super().attend_to_lists(layer, attended, kv_cache, metadata, output)
            return
        table = attended.block_table.flatten(0, 1)
        of_one = len(table), -1, self.head_size
        chosen = metadata_of(attended, metadata)
        chosen.block_table, chosen.num_actual_tokens = table, len(table)
        chosen.query_start_loc, chosen.seq_lens = requests
        rows = len(attended.block_table)
        # A copy where a row's query lies next to its keys.
        query = attended.query[:rows].reshape(of_one)
        FlashAttentionImpl.forward(
            self.of_one_head,
            layer,
            query,
            query,  # keys and values are in the cache, and these are not read
            query,
            view_of_heads(kv_cache),
            chosen,
            output[:rows].view(of_one),
        )

    def names_of_heads(self, kv_cache: torch.Tensor) -> HeadNames | None:
        """Return the names of KV heads, where FlashAttention may attend to each.

        Not where heads have learned sinks (of which a request of one head would need its own),
        where FlashAttention reads pages of another size, and where a cache has too many rows for
        the view's blocks to be numbered in 32 bits.
        """
        is_small = kv_cache.shape[:3].numel() < 2**31
        if self.sinks is not None or not is_small or getattr(self, "fa4_hd256", False):
            return None
        return head_names(kv_cache)


class PyramidFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend under the name that plugins may take."""

    # From vLLM 0.33 on models may write the cache themselves, past `do_kv_cache_update`.
    supports_kv_cache_update_bypass: bool = False
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return PyramidFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return PyramidFlashBuilder
