# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention with a table per layer."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_pyramid.worker.backend_cuda import PyramidBuilderMixin, PyramidImplMixin


class PyramidTritonBuilder(PyramidBuilderMixin, TritonAttentionMetadataBuilder):
    """See `PyramidBuilderMixin`."""


class PyramidTritonImpl(PyramidImplMixin, TritonAttentionImpl):
    """See `PyramidImplMixin`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With a cache of 8-bit floats vLLM would quantise the queries too, which scorers look at.
        self.supports_quant_query_input = False


class PyramidTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend under the name that plugins may take."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3"),
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
