# SPDX-License-Identifier: Apache-2.0
"""Make vLLM build our KV cache coordinator over our block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import vllm.v1.core.kv_cache_coordinator as kv_cache_coordinator
import vllm.v1.core.kv_cache_manager as kv_cache_manager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache


@contextmanager
def _replaced(module: ModuleType, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Bind `name` of a module to `value` within the context."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def lockstep_coordinator(cls: type[KVCacheCoordinatorNoPrefixCache]) -> Iterator[None]:
    """Make `KVCacheManager` build `cls` within the context: vLLM's factory has no registry."""

    def build(*, enable_caching: bool, **kwargs: Any) -> KVCacheCoordinatorNoPrefixCache:
        return cls(**kwargs)  # a request's plan says whether it shares blocks

    with _replaced(kv_cache_manager, "get_kv_cache_coordinator", build):
        yield


@contextmanager
def block_pool(make: Callable[..., BlockPool]) -> Iterator[None]:
    """Make coordinators build their block pool with `make` within the context.

    The managers of the groups get the pool inside the coordinator's constructor.
    """
    with _replaced(kv_cache_coordinator, "BlockPool", make):
        yield
