# SPDX-License-Identifier: Apache-2.0
"""Attention over every layer's own, shorter table, in front of vLLM's CUDA attention backends.

`PyramidImplMixin` goes in front of a stock implementation, as `PyramidBuilderMixin` does in front
of its builder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from vllm_pyramid.attention.cache_parts import CacheParts, parts_of_scaled_rows
from vllm_pyramid.attention.layer_context import LayerContext, ReaderContext, own_inputs
from vllm_pyramid.compat.backend_names import FP8_CACHES, SCALED_ROWS
from vllm_pyramid.compat.cache_specs import scales_of
from vllm_pyramid.kernels import get_ops
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Softmax
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite, HeadNames
from vllm_pyramid.step.hooks import LAYER_HOOKS


def metadata_of(inputs: AttentionInputs, metadata: Any) -> Any:
    """Return a copy of the stock metadata with the table and lengths that a method chose.

    Schedules and graphs would be of the step's own table; our builders make none.
    """
    batch = inputs.batch
    assert batch.max_query_len is not None and batch.max_seq_len is not None
    chosen = copy.copy(metadata)
    chosen.block_table = batch.block_table
    chosen.query_start_loc = batch.query_start_loc
    chosen.seq_lens = batch.seq_lens
    chosen.max_query_len, chosen.max_seq_len = batch.max_query_len, batch.max_seq_len
    return chosen


class PyramidImplMixin:
    """Gathers and evicts after the stock attention, where the policy and the step ask for it.

    Attributes:
        context: set by the model runner.
        serves_single_heads: whether KV heads may have block tables of their own.
        sinks: learned ones, `[H]`, or None.
    """

    context: LayerContext | ReaderContext | None = None
    serves_single_heads = True
    sinks: torch.Tensor | None = None
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    logits_soft_cap: float
    kv_cache_dtype: str
    _of_one_head: Any = None

    @property
    def of_one_head(self) -> Any:
        """The same implementation for a layer with one of its KV heads."""
        if self._of_one_head is None:
            self._of_one_head = copy.copy(self)
            self._of_one_head.num_kv_heads = 1
            self._of_one_head.num_heads = self.num_heads // self.num_kv_heads
        return self._of_one_head

    @classmethod
    def called_hooks(cls, policy: Policy) -> frozenset[str]:
        """Return the hooks of layers that are called in every step, which a graph of it leaves out.

        Where a policy works during prompts alone, steps that only decode may be such graphs: what
        gathers from prompts is called, what attends is not.
        """
        if policy.works_in_every_step or policy.attends:
            return LAYER_HOOKS
        if any(part.works_during_prompt for part in policy.parts):
            return frozenset({"after_write", "after_attention"})
        return frozenset()

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values, `[T, G, D]`, to their slots, by vLLM's kernel.

        Where V is in host memory, our kernel writes K, and a method writes V.
        """
        context = self.context
        if context is not None:
            key, value, slot_mapping = context.to_write(layer, key, value, slot_mapping)
        if context is None or context.values is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        if context is None or (context.values is None and not context.hooks.after_write):
            return
        parts = self._parts(layer, kv_cache)
        write = CacheWrite(
            get_ops(key.device.type),
            context.layer,
            key,
            value,
            parts.keys,
            parts.values,
            slot_mapping,
            key_scale=parts.scales.get("key_scale", 1.0),
            value_scale=parts.scales.get("value_scale", 1.0),
        )
        if context.values is not None:
            write.ops.write_rows(key, parts.keys, slot_mapping, scale=write.key_scale)
        context.after_write(write)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend by vLLM's kernel or a method, then let the policy gather and evict.

        `query` is `[T, H, D]`, `output` `[T, H, D]`, written. `kv_cache` is `[P, G, N, 2 * D]`, K
        then V in a token's row, or `[P, G, N, D]` where V is in host memory and a method attends.
        """
        context = self.context
        attend: Callable[..., torch.Tensor] = self.stock_attention
        if context is not None:
            attend = context.attention_of(self)
        call = (layer, query, key, value, kv_cache, attn_metadata, output, *args)
        if attn_metadata is None or attn_metadata.kv_step is None:
            return attend(*call, **kwargs)
        assert context is not None, "the layer was not bound"
        if attn_metadata.kv_step.evictions is None and not context.hooks.in_layers:
            return attend(*call, **kwargs)
        is_fused = any(scale is not None for scale in (*args, *kwargs.values()))
        if context.hooks.attend and is_fused:
            raise NotImplementedError("a method that attends writes no fused output quantisation")
        requests = attn_metadata.kv_no_skips.shape[0]
        tokens = query[: attn_metadata.num_actual_tokens // context.tables_per_layer]
        # The layer's shifted row begins with the first block that it holds.
        inputs = self.call_of(
            layer,
            tokens,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc[: requests + 1],
            attn_metadata.seq_lens[:requests],
            attn_metadata.kv_no_skips,
            attn_metadata.kv_offsets,
            max_query_len=attn_metadata.max_query_len,
            max_seq_len=attn_metadata.max_seq_len,
        )
        result, attended = output, context.before_attention(inputs)
        if not context.attend(attended, output[: len(tokens)]):
            if context.values is not None:
                raise RuntimeError(
                    f"V of layer {context.layer} lies elsewhere, and no method attends"
                )
            if attended is inputs:
                result = attend(*call, **kwargs)
            elif attended.block_table.dim() == 3:  # which the stock kernels do not read
                if is_fused:
                    raise NotImplementedError("lists of pages have no fused output quantisation")
                self.attend_to_lists(layer, attended, kv_cache, attn_metadata, output)
            else:
                chosen = metadata_of(attended, attn_metadata)
                result = attend(layer, query, key, value, kv_cache, chosen, output, *args, **kwargs)
        context.after_attention(own_inputs(inputs, attended), output)
        return result

    def stock_attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend by vLLM's kernel; arguments as of `forward`."""
        found: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        return found

    def attend_to_lists(
        self,
        layer: Any,
        attended: AttentionInputs,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Attend by our own kernel to lists of pages of each KV head, `[S, G, W]`."""
        out = output[: len(attended.query)]
        attended.ops.paged_attention(out, attended.batch, attended.softmax)

    def names_of_heads(self, kv_cache: torch.Tensor) -> HeadNames | None:
        """Return how lists may name KV heads, for `attend_to_lists`; None: our kernel attends."""
        return None

    def _parts(self, layer: Any, kv_cache: torch.Tensor) -> CacheParts:
        values = self.context.values if self.context is not None else None
        if (of_rows := SCALED_ROWS.get(self.kv_cache_dtype)) is not None:
            if values is not None:
                raise RuntimeError(
                    f"V of a {self.kv_cache_dtype} cache is in K's pages, and "
                    f"{tuple(values.shape)} lies elsewhere; report this"
                )
            return parts_of_scaled_rows(kv_cache, of_rows)
        scales = {}
        if (fp8 := FP8_CACHES.get(self.kv_cache_dtype)) is not None:
            kv_cache = kv_cache.view(fp8)
            values = None if values is None else values.view(fp8)
            scales = dict(zip(("key_scale", "value_scale"), scales_of(layer), strict=True))
        if values is not None:
            return CacheParts(kv_cache, values, scales)
        size = self.head_size
        return CacheParts(kv_cache[..., :size], kv_cache[..., size:], scales)

    def call_of(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        no_skips: torch.Tensor,
        offsets: torch.Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
    ) -> AttentionInputs:
        """Return the layer's attention as our own kernels see it.

        `tables` are `[>= R, M]`, shifted; `starts` `[R + 1]`; `lens`, `no_skips` and `offsets`
        `[R]`.
        """
        context = self.context
        assert context is not None, "the layer was not bound"
        parts = self._parts(layer, kv_cache)
        assert query.dtype not in FP8_DTYPES, "scorers look at queries that were not quantised"
        batch = AttentionBatch(
            query,
            parts.keys,
            parts.values,
            tables,
            starts,
            lens,
            no_skips,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            **parts.scales,
        )
        softmax = Softmax(
            self.scale, soft_cap=self.logits_soft_cap or 0.0, sinks=getattr(self, "sinks", None)
        )
        return AttentionInputs(
            get_ops(query.device.type),
            context.layer,
            batch,
            softmax,
            ranks=context.ranks,
            rotary=context.rotary,
            offsets=offsets,
            rows=parts.rows,
            head_names=self.names_of_heads(kv_cache),
        )
