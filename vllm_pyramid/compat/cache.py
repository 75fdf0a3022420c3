# SPDX-License-Identifier: Apache-2.0
"""The KV cache's specs and managers.

Target: `KVCacheSpecRegistry._ensure_registered`,
`SingleTypeKVCacheManager._remove_blocks_in_range`. Why: vLLM registers its own specs only if the
registry is still empty, so they must go first; the head of a request's blocks goes back as a
sliding window's would. Remove when both are public.
"""

from __future__ import annotations

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def register_stock_specs() -> None:
    """Let vLLM's own specs be known. Idempotent."""
    KVCacheSpecRegistry._ensure_registered()


def return_head(manager: SingleTypeKVCacheManager, request_id: str, num_blocks: int) -> None:
    """Return the first blocks of a request to the pool; null blocks take their places."""
    manager._remove_blocks_in_range(request_id, 0, num_blocks)
