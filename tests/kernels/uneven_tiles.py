# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of which some tiles are worth more than others."""

from __future__ import annotations

import torch

from vllm_pyramid.plan.tiles import TILE


def uneven(kv_heads: int = 2, group: int = 2, tiles: int = 7) -> tuple[torch.Tensor, ...]:
    """Queries, pages of keys and their order, of which some tiles are worth much more."""
    generator = torch.Generator().manual_seed(4)
    tokens = tiles * TILE
    query = 2 * torch.randn(tokens, kv_heads * group, 32, generator=generator)
    keys = torch.randn(tokens, kv_heads, 32, generator=generator)
    common = torch.randn(tiles, kv_heads, 32, generator=generator).repeat_interleave(TILE, dim=0)
    keys += common
    query += 2 * common.roll(3 * TILE, 0).repeat_interleave(group, dim=1)
    blocks = torch.randperm(tokens // 16, generator=generator)
    cache = torch.empty(tokens // 16, kv_heads, 16, 32)
    cache[blocks] = keys.unflatten(0, (-1, 16)).transpose(1, 2)
    return query, keys, cache, blocks.int()
