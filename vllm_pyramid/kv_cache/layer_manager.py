# SPDX-License-Identifier: Apache-2.0
"""The blocks of one layer."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_pyramid.compat.cache_specs import return_head
from vllm_pyramid.kv_cache.bundles import BundlePool


class LayerKVCacheManager(FullAttentionManager):
    """The blocks of one layer for every request; `LockstepCoordinator` decides when they change.

    To vLLM it is a full-attention manager without prefix caching. It can give back the head of a
    request's blocks, as a sliding window does. Blocks come from the pool of the layer's stage.

        before   [b0][b1][b2][b3][b4]      after release_head(rid, 3)   [null][null][null][b3][b4]
    """

    def __init__(self, kv_cache_spec: Any, block_pool: BundlePool, **kwargs: Any) -> None:
        own = block_pool.of_layer(kv_cache_spec.layer_idx)
        super().__init__(kv_cache_spec, block_pool=own, **kwargs)

    def release_head(self, request_id: str, num_blocks: int) -> int:
        """Return a request's first blocks to the pool, and how many went back; 0 if they had gone
        before.

        Null blocks keep their places in the table, so token p is still in entry p // block size.
        """
        before = self.block_pool.get_num_free_blocks()
        return_head(self, request_id, num_blocks)
        return self.block_pool.get_num_free_blocks() - before
