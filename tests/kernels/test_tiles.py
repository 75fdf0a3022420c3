# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen tiles against plain arithmetic; `lab/tests` compares their choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import head_sinks
from tests.kernels.conftest import Batch, build_batch
from tests.kernels.uneven_tiles import uneven
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.gather_tokens import gather_tokens
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Softmax
from vllm_pyramid.methods.tiles.attention import attend_tiles, choose_tiles
from vllm_pyramid.plan.tiles import TILE

pytestmark = pytest.mark.cpu

EachIsa = Callable[[], Iterator[str]]
SCALE, KEYS, QUERIES = 0.125, 7, 3  # tiles


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Batch:
    """One request whose last tiles are queries; unused memory holds NaN."""
    batch = build_batch([KEYS * TILE], [QUERIES * TILE], dtype=dtype, **options)
    batch.block_table = batch.block_table[:, : KEYS * TILE // batch.key_cache.shape[2]]
    return batch


def random_lists(kv_heads: int, seed: int = 1) -> torch.Tensor:
    """Lists of tiles that differ between KV heads, each with its own tile."""
    generator = torch.Generator().manual_seed(seed)
    taken = torch.rand(QUERIES, kv_heads, KEYS, generator=generator) < 0.4
    for tile in range(QUERIES):
        own = KEYS - QUERIES + tile
        taken[tile, :, own], taken[tile, :, own + 1 :] = True, False
    return taken


def arithmetic(
    batch: AttentionBatch, taken: torch.Tensor, scale: float, sinks: Any = None, cap: float = 0.0
) -> torch.Tensor:
    """The attention with a mask, in float64."""
    length, heads = KEYS * TILE, batch.query.shape[1]
    group = heads // taken.shape[1]
    k, v = (
        gather_tokens(cache, batch.block_table[0], 0, length).double()
        for cache in (batch.key_cache, batch.value_cache)
    )
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", batch.query.double(), k) * scale * batch.key_scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    seen = taken.repeat_interleave(group, dim=1).permute(1, 0, 2)
    seen = seen.repeat_interleave(TILE, dim=1).repeat_interleave(TILE, dim=2)
    position = torch.arange(length)
    seen = seen & (position <= position[-QUERIES * TILE :, None])
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v) * batch.value_scale


def attended(module: Any, batch: AttentionBatch, taken: torch.Tensor, softmax: Softmax) -> Any:
    out = torch.full(batch.query.shape, float("nan"))
    attend_tiles(module, out, batch, softmax, batch.block_table[0], taken)
    return out


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lists_against_a_mask(each_isa: EachIsa, dtype: torch.dtype, block_size: int) -> None:
    batch = made(dtype, block_size=block_size).attention()
    taken, softmax = random_lists(2), Softmax(SCALE)
    right = arithmetic(batch, taken, SCALE)
    assert float((right - arithmetic(batch, random_lists(2, seed=2), SCALE)).abs().max()) > 0.1
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(attended(reference, batch, taken, softmax).double(), right, **close)
    for _ in each_isa():
        torch.testing.assert_close(attended(cpu, batch, taken, softmax).double(), right, **close)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 5), (3, 1), (2, 4)])
def test_sinks_and_soft_caps_of_any_heads(each_isa: EachIsa, kv_heads: int, group: int) -> None:
    batch = made(kv_heads=kv_heads, group=group).attention()
    taken, sinks = random_lists(kv_heads), head_sinks(kv_heads * group)
    softmax = Softmax(SCALE, soft_cap=3.0, sinks=sinks)
    right = arithmetic(batch, taken, SCALE, sinks, 3.0)
    for _ in each_isa():
        found = attended(cpu, batch, taken, softmax).double()
        torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_caches_of_8_bits(each_isa: EachIsa, dtype: torch.dtype) -> None:
    batch = made(torch.bfloat16).attention()
    caches = [cache.nan_to_num().to(dtype) for cache in (batch.key_cache, batch.value_cache)]
    # As they are laid out: the heads of a page one behind the other.
    caches = [cache.contiguous() for cache in caches]
    batch = replace(
        batch, key_cache=caches[0], value_cache=caches[1], key_scale=0.5, value_scale=2.0
    )
    taken = random_lists(2)
    right = arithmetic(batch, taken, SCALE)
    for _ in each_isa():
        found = attended(cpu, batch, taken, Softmax(SCALE)).double()
        torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
def test_all_tiles_have_the_bits_of_dense_attention(
    each_isa: EachIsa, dtype: torch.dtype, group: int
) -> None:
    batch = made(dtype, group=group).attention()
    blocks = batch.block_table[0]
    taken = choose_tiles(batch.query, batch.key_cache, blocks, SCALE, 1.0)
    assert int(taken.sum()) == 2 * (5 + 6 + 7)
    for isa in each_isa():
        dense = torch.empty(batch.query.shape)
        cpu.paged_attention(dense, batch, Softmax(SCALE))
        assert torch.equal(attended(cpu, batch, taken, Softmax(SCALE)), dense), isa


def test_tiles_that_are_not_listed_are_not_read(each_isa: EachIsa) -> None:
    batch = made().attention()
    taken = random_lists(2)
    taken[:, :, 1] = False
    for _ in each_isa():
        found = attended(cpu, batch, taken, Softmax(SCALE))
        key, value = (cache.clone() for cache in (batch.key_cache, batch.value_cache))
        memory = torch.cat([key, value], dim=2)
        ids = batch.block_table[0, TILE // 16 : 2 * TILE // 16].long()
        memory[ids] = float("nan")
        other = replace(batch, key_cache=memory[:, :, :16], value_cache=memory[:, :, 16:])
        assert torch.equal(attended(cpu, other, taken, Softmax(SCALE)), found)


def test_shapes_that_do_not_fit_are_refused() -> None:
    batch, taken = made().attention(), random_lists(2)
    with pytest.raises(ValueError, match="no sliding window"):
        attended(cpu, batch, taken, Softmax(SCALE, sliding_window=64))
    with pytest.raises(ValueError, match="384 queries and 56 blocks of 16 tokens are not 3 tiles"):
        attended(cpu, batch, taken[:, :, 1:], Softmax(SCALE))
    apart = replace(batch, key_cache=batch.key_cache.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(RuntimeError, match="view"):
        attended(cpu, apart, taken, Softmax(SCALE))


# The choice ---------------------------------------------------------------------------------------


def test_the_choice_of_a_tile_depends_on_no_other() -> None:
    query, _, cache, blocks = uneven(tiles=9)
    whole = choose_tiles(query, cache, blocks, SCALE, 0.9)
    assert int((~whole).tril().sum()) > 0
    for first, last in ((0, 1), (3, 4), (2, 7), (8, 9)):
        part = choose_tiles(
            query[first * TILE : last * TILE],
            cache,
            blocks[: last * TILE // 16],
            SCALE,
            0.9,
        )
        assert torch.equal(part, whole[first:last, :, :last])
