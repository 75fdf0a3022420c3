# SPDX-License-Identifier: Apache-2.0
"""The KV cache spec of one layer, and how it is registered with vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_pyramid.scheduler.manager import LayerKVCacheManager


@dataclass(frozen=True, kw_only=True)
class LayerKVCacheSpec(FullAttentionSpec):
    """Full attention whose blocks belong to one layer alone.

    Layers of this spec never share a KV cache group, so each has a block table of its own; their
    pages have one size and come from one pool. The memory check stays that of the full length,
    because prefill holds the whole prompt in every layer before it evicts.
    """

    layer_idx: int

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge one spec only.

        Raises:
            AssertionError: for several; vLLM takes that as "these layers are not uniform" and
                keeps them apart.
        """
        if len(specs) != 1:
            raise AssertionError("layers with their own KV budget do not share a block table")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Never, unless it is the only one: "uniform" layers are put into one group."""
        return len(kv_cache_specs) == 1


def register_spec() -> None:
    """Make the spec known in this process. Idempotent.

    vLLM registers its own specs only if the registry is still empty, so they go first. Called when
    this module is imported: a worker imports it to make specs, the engine core by unpickling them.
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        LayerKVCacheSpec,
        manager_class=LayerKVCacheManager,
        uniform_type_base_spec=LayerKVCacheSpec,
    )


register_spec()
