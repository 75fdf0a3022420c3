# SPDX-License-Identifier: Apache-2.0
"""FlashAttention with a table per layer."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_pyramid.attention.backend_cuda import PyramidBuilderMixin, PyramidImplMixin


class PyramidFlashBuilder(PyramidBuilderMixin, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata over a layer's own table."""


class PyramidFlashImpl(PyramidImplMixin, FlashAttentionImpl):
    """FlashAttention, with hooks and evictions behind it."""


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
