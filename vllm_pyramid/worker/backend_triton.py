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


class PyramidTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend under the name that plugins may take."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return PyramidTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return PyramidTritonBuilder
