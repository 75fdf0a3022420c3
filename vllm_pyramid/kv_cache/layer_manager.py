# SPDX-License-Identifier: Apache-2.0
"""The blocks of one layer."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_pyramid.compat.cache_specs import return_head
from vllm_pyramid.kv_cache.bundles import BundlePool


class LayerKVCacheManager(FullAttentionManager):
    """Blocks of one layer for every request; `LockstepCoordinator` decides when they change.

    To vLLM it is a full-attention manager without prefix caching. The one thing it adds is giving
    back the head of a request's blocks, as a sliding window would:

        before   [b0][b1][b2][b3][b4]      after release_head(rid, 3)   [null][null][null][b3][b4]

    The blocks come from the pool of the layer's pipeline stage.
    """

    def __init__(self, kv_cache_spec: Any, block_pool: BundlePool, **kwargs: Any) -> None:
        own = block_pool.of_layer(kv_cache_spec.layer_idx)
        super().__init__(kv_cache_spec, block_pool=own, **kwargs)

    def release_head(self, request_id: str, num_blocks: int) -> int:
        """Return the first `num_blocks` blocks of a request to the pool.

        The places stay in the list as null blocks, so token p is still found at p // block size.

        Returns:
            How many blocks were really given back (0 when it was done before).
        """
        before = self.block_pool.get_num_free_blocks()
        return_head(self, request_id, num_blocks)
        return self.block_pool.get_num_free_blocks() - before

    def num_held(self, request_id: str) -> int:
        """Blocks of the pool that the request holds in this layer."""
        return sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))
