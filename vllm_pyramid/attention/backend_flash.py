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
from vllm_pyramid.attention.head_lists import head_names, num_names, view_of_heads
from vllm_pyramid.compat.backend_names import FP8_CACHES
from vllm_pyramid.compat.cache_specs import quantised_query
from vllm_pyramid.step.attention_inputs import AttentionInputs, HeadNames


class PyramidFlashBuilder(PyramidBuilderMixin, FlashAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        """Limit the parts of a row in graphs as vLLM does: by the step's tokens, not by tables."""
        super().__init__(kv_cache_spec, *args, **kwargs)
        if self.max_cudagraph_size is not None:
            self.max_cudagraph_size *= tables_per_layer(kv_cache_spec)


class PyramidFlashImpl(PyramidImplMixin, FlashAttentionImpl):
    """FlashAttention, with hooks and evictions behind it.

    With a cache of 8-bit floats vLLM's layer quantises queries before it calls the back end.
    Scorers look at queries that were not, so here they are quantised before FlashAttention's call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_fp8 = self.kv_cache_dtype in FP8_CACHES
        self._takes_quantised = is_fp8 and self.supports_quant_query_input
        if self._takes_quantised:
            self.supports_quant_query_input = False  # the layer asks when it is made

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Let FlashAttention pass on the scale of queries, now that the layer has been made."""
        super().process_weights_after_loading(act_dtype)
        if self._takes_quantised:
            self.supports_quant_query_input = True

    def stock_attention(
        self, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return super().stock_attention(layer, self._as_taken(layer, query), *args, **kwargs)

    def _as_taken(self, layer: Any, query: torch.Tensor) -> torch.Tensor:
        return quantised_query(layer, query) if self._takes_quantised else query

    def attend_to_lists(
        self,
        layer: Any,
        attended: AttentionInputs,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Attend by FlashAttention to each KV head as a request, else by our kernel."""
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
        # A copy where a row's query lies next to its keys and is not quantised.
        query = self._as_taken(layer, attended.query[:rows]).reshape(of_one)
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

        Not where heads have learned sinks (a request of one head would need its own), where
        FlashAttention reads pages of another size, and where the view has more blocks than 32 bits
        number.
        """
        is_small = num_names(kv_cache) <= 2**31
        if self.sinks is not None or not is_small or getattr(self, "fa4_hd256", False):
            return None
        return head_names(kv_cache)


class PyramidFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend under the name that plugins may take."""

    # From vLLM 0.33 on models may write the cache themselves, past `do_kv_cache_update`.
    supports_kv_cache_update_bypass: bool = False
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False  # scorers multiply by one scale a layer

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return PyramidFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return PyramidFlashBuilder
