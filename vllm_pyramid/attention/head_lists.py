# SPDX-License-Identifier: Apache-2.0
"""Lists of pages for each KV head, for kernels that know one block table for all heads.

A request whose G KV heads have lists becomes G requests of one KV head, over a view of the cache in
which each head of a block is a block:

    cache [P, G, N, 2 D]         view [P', 1, N, 2 D]
    block b, KV head g    ->     block b * per_block + g * per_head

Where tokens lie outside heads, blocks of the view overlap, and most of them are never named. Shape
legend as in `kernels/records.py`.
"""

from __future__ import annotations

from math import gcd

import torch

from vllm_pyramid.step.attention_inputs import HeadNames


def head_names(kv_cache: torch.Tensor) -> HeadNames:
    """Return the names of the KV heads of a cache, `[P, G, N, 2 * D]`, in `view_of_heads`."""
    of_block, of_head, *_ = kv_cache.stride()
    if kv_cache.shape[1] == 1:
        return HeadNames(1, 0)
    step = gcd(of_block, of_head)
    return HeadNames(of_block // step, of_head // step)


def num_names(kv_cache: torch.Tensor) -> int:
    """Return P', one more than the largest name; pages with gaps between them have many names."""
    names, (blocks, heads, *_) = head_names(kv_cache), kv_cache.shape
    # The last one begins where the last head of the last block does, and ends within the cache.
    return (blocks - 1) * names.per_block + (heads - 1) * names.per_head + 1


def view_of_heads(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the view, `[P', 1, N, 2 * D]`, of a cache `[P, G, N, 2 * D]`."""
    of_block, _, *of_rows = kv_cache.stride()
    step = of_block // head_names(kv_cache).per_block
    shape = num_names(kv_cache), 1, *kv_cache.shape[2:]
    return kv_cache.as_strided(shape, (step, step, *of_rows))
