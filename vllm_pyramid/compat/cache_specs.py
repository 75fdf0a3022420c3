# SPDX-License-Identifier: Apache-2.0
"""The KV cache's specs and managers.

Target: `KVCacheSpecRegistry._ensure_registered`,
`SingleTypeKVCacheManager._remove_blocks_in_range`, `Attention._k_scale_float` and
`._v_scale_float`, `TritonAttentionImpl._ensure_scale_caches`, `._k_scale_cache` and
`._is_per_token_head_quant`, `unify_kv_cache_spec_page_size` (in vLLM 0.32 in `kv_cache_utils`, in
0.33 in `kv_cache_planning`). Why: vLLM registers its own specs only if the registry is still empty,
so they must go first; the head of a request's blocks goes back as a sliding window's would; the
layer object is where an attention's scales are; scales of tokens are set to 1 in a layer's first
step, when layers below have written theirs to memory that they share; pages of one size are made by
vLLM in the engine core, when the worker has used its specs already. Remove when they are public.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def register_stock_specs() -> None:
    """Let vLLM's own specs be known. Idempotent."""
    KVCacheSpecRegistry._ensure_registered()


def return_head(manager: SingleTypeKVCacheManager, request_id: str, num_blocks: int) -> None:
    """Return the first blocks of a request to the pool; null blocks take their places."""
    manager._remove_blocks_in_range(request_id, 0, num_blocks)


def scales_of(layer: Any) -> tuple[float, float]:
    """What the numbers in an attention layer's cache of 8-bit floats are multiplied with: K, V."""
    return layer._k_scale_float, layer._v_scale_float


def set_scales_of_tokens(layers: Iterable[Any]) -> None:
    """Let attention with a scale for each token set all of them to 1 now, before the first step.

    It would do so when it first sees its cache, layer by layer: in memory that layers share that
    would destroy the scales that the layers below have just written.
    """
    for layer in layers:
        impl: Any = getattr(layer, "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._k_scale_cache = None
            impl._ensure_scale_caches(layer.kv_cache)


def with_one_page_size(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The specs as vLLM makes them so that all layers share a pool.

    Raises:
        NotImplementedError: that is not possible.
    """
    core: Any = import_module("vllm.v1.core.kv_cache_utils")
    if not hasattr(core, "unify_kv_cache_spec_page_size"):
        core = import_module("vllm.v1.core.kv_cache_planning")
    unified: dict[str, KVCacheSpec] = core.unify_kv_cache_spec_page_size(specs)
    return unified
