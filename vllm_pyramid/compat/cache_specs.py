# SPDX-License-Identifier: Apache-2.0
"""Access specs and managers of the KV cache.

Target: `KVCacheSpecRegistry._ensure_registered`, `SingleTypeKVCacheManager._remove_blocks_in_range`
and `._null_block`, `Attention._k_scale_float` and `._v_scale_float`,
`TritonAttentionImpl._ensure_scale_caches`, `._k_scale_cache` and `._is_per_token_head_quant`,
`unify_kv_cache_spec_page_size` (in vLLM 0.32 in `kv_cache_utils`, in 0.33 in `kv_cache_planning`).
Why: vLLM registers its own specs only if the registry is still empty, so they must be registered
first; a request's first blocks are given back like those of a sliding window; the layer object
holds an attention's scales; vLLM sets the scales of tokens to 1 in a layer's first step, after
lower layers have written theirs to the memory that they share; vLLM unifies page sizes in the
engine core, after the worker has used its specs. Remove when they are public.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

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

    Null blocks take their places, as in `return_head`, whose function takes neighbours alone.

    Returns:
        How many there were.
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


def set_scales_of_tokens(layers: Iterable[Any]) -> None:
    """Set the scale of each token to 1 before the first step, for caches with such scales.

    vLLM does it layer by layer when a layer first uses its cache. In memory that layers share, that
    would overwrite the scales that lower layers have just written.
    """
    for layer in layers:
        impl: Any = getattr(layer, "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._k_scale_cache = None
            impl._ensure_scale_caches(layer.kv_cache)


def with_one_page_size(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Unify the page sizes of specs with vLLM's function, so that all layers share a pool.

    Raises:
        NotImplementedError: the sizes cannot be unified.
    """
    core: Any = import_module("vllm.v1.core.kv_cache_utils")
    if not hasattr(core, "unify_kv_cache_spec_page_size"):
        core = import_module("vllm.v1.core.kv_cache_planning")
    unified: dict[str, KVCacheSpec] = core.unify_kv_cache_spec_page_size(specs)
    return unified
