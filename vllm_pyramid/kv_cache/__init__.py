# SPDX-License-Identifier: Apache-2.0
"""The blocks of the KV cache: one table per layer and request, one counter for all layers.

LockstepCoordinator      what vLLM's scheduler calls; it has the parts below
  RequestPlans           what every request keeps: given, and confirmed by the worker
  CacheStore             what outlives a request and is found by others:
    SessionStore         what turns of a conversation continue with  -> SessionCache
    PrefixStore          which blocks requests share  -> PrefixCache, EvictedPrefixes
  StockGroups            the layers that do not evict
  LayerBlocks            how many blocks the evicting layers need
  LayerKVCacheManager    the blocks of one layer
BundlePool               all blocks; with pipeline stages PipelinePools
Tier                     what is below the pool; HostCache: bundles in host memory
"""
