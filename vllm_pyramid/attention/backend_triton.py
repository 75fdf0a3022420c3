# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention with a table per layer."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_pyramid.attention.backend_cuda import PyramidImplMixin
from vllm_pyramid.attention.cuda_metadata import PyramidBuilderMixin, tables_per_layer
from vllm_pyramid.compat.backend_names import SCALED_ROWS

# Scratch that the builders of one device share, by name and shape; freed with the last of them.
_SCRATCH: WeakValueDictionary[tuple[Any, ...], torch.Tensor] = WeakValueDictionary()


class PyramidTritonBuilder(PyramidBuilderMixin, TritonAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        """Share one scratch between all layers, which run in turn, as with vLLM's one builder.

        A scratch for each layer would take memory that vLLM's profile does not see. Where a layer
        has several tables, each is a request, and rows of the scratch are split so that as many
        programs run as in a batch of vLLM's.
        """
        super().__init__(kv_cache_spec, *args, **kwargs)
        tables = tables_per_layer(kv_cache_spec)
        if tables > 1:
            self.seq_threshold_3D *= tables
            self.max_seqs_64_segments *= tables
            self.num_heads_q //= tables
        for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"):
            own = getattr(self, name)
            if tables > 1:
                own = own.view(-1, own.shape[1] // tables, *own.shape[2:])
            key = (name, own.device, own.dtype, tuple(own.shape))
            setattr(self, name, _SCRATCH.setdefault(key, own))


class PyramidTritonImpl(PyramidImplMixin, TritonAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With a cache of 8-bit floats vLLM would quantise the queries too, which scorers look at.
        self.supports_quant_query_input = False


class PyramidTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend under the name that plugins may take."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", *SCALED_ROWS)
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return PyramidTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return PyramidTritonBuilder
