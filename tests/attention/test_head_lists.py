# SPDX-License-Identifier: Apache-2.0
"""Each KV head as a request of its own: the same attention, in either layout of the cache."""

from __future__ import annotations

import pytest
import torch

from vllm_pyramid.attention.head_lists import head_names, num_names, view_of_heads
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax

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

    names, view = head_names(cache), view_of_heads(cache)
    assert view.shape[1] == 1
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    of_heads = torch.arange(heads, dtype=torch.int32)[:, None] * names.per_head
    own = AttentionBatch(
        query.reshape(REQUESTS * heads, GROUP, SIZE),
        view[..., :SIZE],
        view[..., SIZE:],
        (table * names.per_block + of_heads).flatten(0, 1),
        torch.arange(REQUESTS * heads + 1, dtype=torch.int32),
        lens.repeat_interleave(heads),
        torch.zeros(REQUESTS * heads, dtype=torch.int32),
    )
    reference.paged_attention(out.view(REQUESTS * heads, GROUP, SIZE), own, softmax)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert not torch.isclose(out[0], out[1]).all()


@pytest.mark.parametrize(("gap", "names"), [(0, 8 * 3 + 3), (8, 8 * 13 + 9)])
def test_pages_with_gaps_between_them_have_more_names(gap: int, names: int) -> None:
    """A gap that heads do not divide makes a name of each piece that divides both."""
    block = HEADS * N * 2 * SIZE + gap * 2
    strides = (block, N * 2 * SIZE, 2 * SIZE, 1)
    cache = torch.randn(BLOCKS * block).as_strided((BLOCKS, HEADS, N, 2 * SIZE), strides)
    view, own = view_of_heads(cache), head_names(cache)
    assert len(view) == num_names(cache)
    last = view[(BLOCKS - 1) * own.per_block + (HEADS - 1) * own.per_head, 0]
    assert torch.equal(last, cache[-1, -1])
    assert num_names(cache) == names
