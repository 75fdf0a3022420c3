# SPDX-License-Identifier: Apache-2.0
"""Lists of pages for each KV head, for kernels that know one block table for all heads.

A request whose G KV heads have lists of their own becomes G requests of one KV head, over a view of
the cache in which each head of a block is a block:

    cache [P, G, N, 2 D]         view [P', 1, N, 2 D]
    block b, KV head g    ->     block b * per_block + g * per_head

The view begins a block wherever a head's rows may begin. Where heads lie outside tokens these are
the heads of all blocks, one behind the other; where tokens lie outside heads, blocks of the view
overlap, and most of them are never named.

Shape legend as in `kernels/records.py`; S requests of one query each, W pages of a list.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from vllm_pyramid.kernels.records import AttentionBatch


class SingleHeads(NamedTuple):
    """S requests of G KV heads as S * G requests of one.

    Attributes:
        query: `[S * G, H / G, D]`. kv_cache: the view, `[P', 1, N, 2 * D]`.
        block_table: `[S * G, W]` int32. starts: `[S * G + 1]` int32. seq_lens: `[S * G]` int32.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor


def single_heads(batch: AttentionBatch, kv_cache: torch.Tensor) -> SingleHeads:
    """Return a batch whose table is `[S, G, W]`, as requests of one KV head.

    Args:
        batch: of one query a request, without skips. kv_cache: `[P, G, N, 2 * D]`.
    """
    blocks, heads, *rows = kv_cache.shape
    of_block, of_head, *of_rows = kv_cache.stride()
    step = gcd(of_block, of_head) if heads > 1 else of_block
    per_block, per_head = of_block // step, of_head // step if heads > 1 else 0
    # The last one begins where the last head of the last block does, and ends within the cache.
    count = (blocks - 1) * per_block + (heads - 1) * per_head + 1
    view = kv_cache.as_strided((count, 1, *rows), (step, step, *of_rows))
    table, device = batch.block_table, batch.query.device
    places = torch.arange(heads, dtype=torch.int32, device=device) * per_head
    requests = len(table) * heads
    return SingleHeads(
        batch.query[: len(table)].unflatten(1, (heads, -1)).flatten(0, 1),
        view,
        (table * per_block + places[:, None]).flatten(0, 1),
        torch.arange(requests + 1, dtype=torch.int32, device=device),
        # Of one request `flatten` would be a view, which FlashAttention does not take.
        batch.seq_lens[:, None].expand(-1, heads).flatten().contiguous(),
    )
