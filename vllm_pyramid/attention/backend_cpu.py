# SPDX-License-Identifier: Apache-2.0
"""The attention backend of the CPU platform: every layer attends to what it kept."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_pyramid.attention.cpu_metadata import PyramidCpuMetadata, PyramidCpuMetadataBuilder
from vllm_pyramid.attention.layer_context import LayerContext, ReaderContext, own_inputs
from vllm_pyramid.compat.backend_names import CPU_BLOCK_SIZE, FP8_CACHES
from vllm_pyramid.compat.cache_specs import scales_of
from vllm_pyramid.kernels import get_ops
from vllm_pyramid.kernels.cpu.checks import MAX_HEAD_SIZE
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
from vllm_pyramid.step.hooks import LAYER_HOOKS

# Set to 0, requests read pages that they share each by itself: a request then has the same bits in
# every batch.
SHARED_VARIABLE = "VLLM_PYRAMID_SHARED_PREFIXES"


def shares_prefixes() -> bool:
    """Return whether requests read shared pages together; ValueError if it is neither 0 nor 1."""
    value = os.environ.get(SHARED_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SHARED_VARIABLE}={value} must be 0 or 1 (the default)")
    return value == "1"


class PyramidCpuBackend(AttentionBackend):
    """Paged attention on the CPU with a token range per layer and request."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PyramidCpuImpl]:
        return PyramidCpuImpl

    @staticmethod
    def get_builder_cls() -> type[PyramidCpuMetadataBuilder]:
        return PyramidCpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(8)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the block size without `--block-size`: vLLM 0.33 asks, 0.32 asks the platform."""
        return CPU_BLOCK_SIZE

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout with heads outside tokens: a KV head's rows are contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class PyramidCpuImpl(AttentionImpl[PyramidCpuMetadata]):
    """Attention of one layer.

    Attributes:
        context: set by the model runner for layers that evict, and those that read their caches.
        serves_single_heads: whether KV heads may have block tables of their own.
    """

    context: LayerContext | ReaderContext | None = None
    serves_single_heads = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("ALiBi has no kernel in vllm-pyramid's CPU platform")
        if attn_type != AttentionType.DECODER:
            raise ValueError(
                f"attention of type {attn_type} has no kernel in vllm-pyramid's CPU platform; it "
                "serves decoder-only models"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.sinks = sinks
        self.scale = float(scale)
        self.softmax = Softmax(
            self.scale,
            soft_cap=float(logits_soft_cap or 0.0),
            sliding_window=sliding_window or 0,
            sinks=sinks,
        )
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.kv_cache_dtype = kv_cache_dtype
        self._fp8 = FP8_CACHES.get(kv_cache_dtype)
        self.ops = get_ops("cpu")
        self._shares_prefixes = shares_prefixes()

    @classmethod
    def called_hooks(cls, policy: Policy) -> frozenset[str]:
        """Return the hooks of layers that are called in every step: all, as there are no graphs."""
        return LAYER_HOOKS

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, `[P, G, N, D]`; vLLM's memory is all K where V is in host memory."""
        values = self.context.values if self.context is not None else None
        if self._fp8 is not None:
            kv_cache = kv_cache.view(self._fp8)
            values = None if values is None else values.view(self._fp8)
        if values is not None:
            return kv_cache, values
        blocks, heads, tokens, content = kv_cache.shape
        planes = kv_cache.view(blocks, heads, 2 * tokens, content // 2)
        return planes[:, :, :tokens], planes[:, :, tokens:]

    def _scales(self, layer: Any) -> tuple[float, float]:
        """Return the scales of K and V in the cache that the layer reads."""
        if self._fp8 is None:
            return 1.0, 1.0
        if (target := self.kv_sharing_target_layer_name) is not None:
            layer = get_forward_context().no_compile_layers[target]
        return scales_of(layer)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values, `[T, G, D]`, to their slots."""
        key_cache, value_cache = self._split(kv_cache)
        context = self.context
        if context is not None:
            key, value, slot_mapping = context.to_write(layer, key, value, slot_mapping)
        key_scale, value_scale = self._scales(layer)
        self.ops.reshape_and_cache(
            *(key, value, key_cache, value_cache, slot_mapping),
            key_scale=key_scale,
            value_scale=value_scale,
        )
        if context is not None and context.hooks.after_write:
            context.after_write(
                CacheWrite(
                    self.ops,
                    context.layer,
                    key,
                    value,
                    key_cache,
                    value_cache,
                    slot_mapping,
                    key_scale,
                    value_scale,
                )
            )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PyramidCpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, then let the policy gather and evict.

        `query` is `[T, H, D]`, `kv_cache` `[P, G, N, 2 * D]`, and `output` `[T, H, D]`, written.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported on the CPU")
        if attn_metadata is None:  # profiling run
            return output.zero_()
        meta, context = attn_metadata, self.context
        key_cache, value_cache = self._split(kv_cache)
        query, out = query[: meta.num_tokens], output[: meta.num_tokens]
        log_sum_exp = None
        if context is not None and context.step.wants_log_sum_exp and context.computes_log_sum_exp:
            log_sum_exp = torch.empty(query.shape[:2], dtype=torch.float32)
        key_scale, value_scale = self._scales(layer)
        batch = AttentionBatch(
            query,
            key_cache,
            value_cache,
            meta.block_table,
            meta.query_start_loc,
            meta.seq_lens,
            meta.skips,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        inputs = AttentionInputs(
            self.ops,
            context.layer if context is not None else 0,
            batch,
            self.softmax,
            ranks=context.ranks if context is not None else None,
            rotary=context.rotary if context is not None else None,
            log_sum_exp=log_sum_exp,
        )
        if context is None:
            self._attend(inputs, out)
            return output
        attended = context.before_attention(inputs)
        if not context.attend(attended, out):
            self._attend(attended, out)
        context.after_attention(own_inputs(inputs, attended), out)
        return output

    def _attend(self, inputs: AttentionInputs, out: torch.Tensor) -> None:
        ops = self.ops
        attend = ops.shared_attention if self._shares_prefixes else ops.paged_attention
        attend(out, inputs.batch, inputs.softmax, log_sum_exp=inputs.log_sum_exp)
