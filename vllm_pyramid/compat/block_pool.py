# SPDX-License-Identifier: Apache-2.0
"""Which KV cache coordinator vLLM builds, and over which block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.core.kv_cache_coordinator as kv_cache_coordinator
import vllm.v1.core.kv_cache_manager as kv_cache_manager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache


@contextmanager
def lockstep_coordinator(cls: type[KVCacheCoordinatorNoPrefixCache]) -> Iterator[None]:
    """Inside, `KVCacheManager` builds `cls` instead of choosing a coordinator itself.

    Target: `vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator`. Why: it chooses by prefix
    caching and group count and has no registry. How to remove: when vLLM lets a KV cache config
    or a spec name its coordinator.
    """
    original = kv_cache_manager.get_kv_cache_coordinator

    def build(*, enable_caching: bool, **kwargs: Any) -> Any:
        return cls(**kwargs)  # whether a request shares its blocks is said with its plan

    kv_cache_manager.get_kv_cache_coordinator = build
    try:
        yield
    finally:
        kv_cache_manager.get_kv_cache_coordinator = original


@contextmanager
def block_pool(make: Callable[..., BlockPool]) -> Iterator[None]:
    """Inside, coordinators build their block pool with `make`.

    Target: `vllm.v1.core.kv_cache_coordinator.BlockPool`. Why: the managers of the groups get the
    pool when they are built, inside the coordinator's constructor. How to remove: when a
    coordinator can be given its pool.
    """
    original = kv_cache_coordinator.BlockPool
    kv_cache_coordinator.BlockPool = make
    try:
        yield
    finally:
        kv_cache_coordinator.BlockPool = original
