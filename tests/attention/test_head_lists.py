# SPDX-License-Identifier: Apache-2.0
"""Each KV head as a request of its own: the same attention, in either layout of the cache."""

from __future__ import annotations

import pytest
import torch

from vllm_pyramid.attention.head_lists import single_heads
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax

pytestmark = pytest.mark.cpu

BLOCKS, HEADS, GROUP, N, SIZE, REQUESTS, WIDTH = 9, 3, 2, 4, 8, 2, 3


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("order", ["heads outside tokens", "tokens outside heads"])
def test_single_heads_attend_as_lists(order: str, heads: int) -> None:
    """The last head of the last block is among them: a view that ends too early would not be."""
    source = torch.Generator().manual_seed(3)
    if order == "heads outside tokens":
        cache = torch.randn(BLOCKS, heads, N, 2 * SIZE, generator=source)
    else:
        cache = torch.randn(BLOCKS, N, heads, 2 * SIZE, generator=source).transpose(1, 2)
    query = torch.randn(REQUESTS, heads * GROUP, SIZE, generator=source)
    table = torch.stack(
        [torch.randperm(BLOCKS, generator=source)[:WIDTH] for _ in range(REQUESTS * heads)]
    )
    table = table.int().view(REQUESTS, heads, WIDTH)
    table[-1, -1, 0] = BLOCKS - 1
    lens = torch.tensor([WIDTH * N, 2 * N + 1], dtype=torch.int32)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    caches = cache[..., :SIZE], cache[..., SIZE:]
    batch = AttentionBatch(query, *caches, table, starts, lens, torch.zeros_like(lens))
    expected, out = torch.empty_like(query), torch.empty_like(query)
    softmax = Softmax(SIZE**-0.5)
    reference.paged_attention(expected, batch, softmax)

    lists = single_heads(batch, cache)
    assert lists.kv_cache.shape[1] == 1 and lists.block_table.dtype == torch.int32
    assert lists.kv_cache.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    own = AttentionBatch(
        lists.query,
        lists.kv_cache[..., :SIZE],
        lists.kv_cache[..., SIZE:],
        lists.block_table,
        lists.starts,
        lists.seq_lens,
        torch.zeros_like(lists.seq_lens),
    )
    reference.paged_attention(out.view(REQUESTS * heads, GROUP, SIZE), own, softmax)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert not torch.isclose(out[0], out[1]).all()


@pytest.mark.parametrize("requests", [1, 2])
def test_what_flash_attention_takes_is_contiguous(requests: int) -> None:
    """Also of one request, of which an expanded tensor can be flattened without a copy."""
    cache = torch.zeros(BLOCKS, HEADS, N, 2 * SIZE)
    query = torch.zeros(requests, HEADS * GROUP, SIZE)
    table = torch.ones(requests, HEADS, WIDTH, dtype=torch.int32)
    lens = torch.full((requests,), N, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    caches = cache[..., :SIZE], cache[..., SIZE:]
    batch = AttentionBatch(query, *caches, table, starts, lens, torch.zeros_like(lens))
    lists = single_heads(batch, cache)
    for tensor in (lists.query, lists.block_table, lists.starts, lists.seq_lens):
        assert tensor.is_contiguous()
    assert lists.seq_lens.tolist() == [N] * (requests * HEADS)
