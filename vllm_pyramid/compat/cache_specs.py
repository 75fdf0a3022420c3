# SPDX-License-Identifier: Apache-2.0
"""Access specs and managers of the KV cache (targets and reasons: the ledger in `compat`)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from vllm import _custom_ops
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def register_stock_specs() -> None:
    """Register vLLM's own specs. Idempotent."""
    KVCacheSpecRegistry._ensure_registered()


def return_head(manager: SingleTypeKVCacheManager, request_id: str, num_blocks: int) -> None:
    """Return the first blocks of a request to the pool; null blocks take their places."""
    manager._remove_blocks_in_range(request_id, 0, num_blocks)


def return_blocks(manager: SingleTypeKVCacheManager, request_id: str, entries: range) -> int:
    """Return the blocks in some entries of a request's table to the pool, the deepest first.

    Null blocks take their places, as in `return_head`, whose function takes neighbours alone. The
    result is how many there were.
    """
    table = manager.req_to_blocks.get(request_id, [])
    entries = entries[: len(range(entries.start, len(table), entries.step))]
    freed = [table[entry] for entry in reversed(entries) if not table[entry].is_null]
    for entry in entries:
        table[entry] = manager._null_block
    manager.block_pool.free_blocks(freed)
    return len(freed)


def scales_of(layer: Any) -> tuple[float, float]:
    """Return the scales of K and V in an attention layer's cache of 8-bit floats."""
    return layer._k_scale_float, layer._v_scale_float


def quantised_query(layer: Any, query: torch.Tensor) -> torch.Tensor:
    """Return queries, `[T, H, D]`, as 8-bit floats, divided by the layer's scale of queries.

    vLLM's attention layer does the same where its back end takes quantised queries. One launch.
    """
    found, _ = _custom_ops.scaled_fp8_quant(query.flatten(1), layer._q_scale)
    return found.view(query.shape)


def set_scales_of_tokens(layers: Iterable[Any]) -> None:
    """Set the scale of each token to 1 before the first step, for caches with such scales.

    vLLM does it when a layer first uses its cache. In memory that layers share, that would
    overwrite the scales that lower layers have just written.
    """
    for layer in layers:
        impl: Any = getattr(layer, "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._k_scale_cache = None
            impl._ensure_scale_caches(layer.kv_cache)


def with_one_page_size(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Unify the page sizes of specs with vLLM's function, so that all layers share a pool.

    vLLM does so in the engine core, after the worker has used its specs. NotImplementedError: they
    cannot be unified.
    """
    core: Any = import_module("vllm.v1.core.kv_cache_utils")
    if not hasattr(core, "unify_kv_cache_spec_page_size"):
        core = import_module("vllm.v1.core.kv_cache_planning")
    unified: dict[str, KVCacheSpec] = core.unify_kv_cache_spec_page_size(specs)
    return unified
