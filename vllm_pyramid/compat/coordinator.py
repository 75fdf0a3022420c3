# SPDX-License-Identifier: Apache-2.0
"""Which KV cache coordinator vLLM builds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.core.kv_cache_manager as kv_cache_manager
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache


@contextmanager
def lockstep_coordinator(cls: type[KVCacheCoordinatorNoPrefixCache]) -> Iterator[None]:
    """Inside, `KVCacheManager` builds `cls` instead of choosing a coordinator itself.

    Target: `vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator`. Why: it chooses by prefix
    caching and group count and has no registry. How to remove: when vLLM lets a KV cache config
    or a spec name its coordinator.
    """
    original = kv_cache_manager.get_kv_cache_coordinator

    def build(*, use_eagle: bool, enable_caching: bool, **kwargs: Any) -> Any:
        assert not enable_caching, "prefix caching is refused before the scheduler is built"
        return cls(use_eagle=use_eagle, **kwargs)

    kv_cache_manager.get_kv_cache_coordinator = build
    try:
        yield
    finally:
        kv_cache_manager.get_kv_cache_coordinator = original
