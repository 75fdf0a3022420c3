# SPDX-License-Identifier: Apache-2.0
"""`compact` and `reshape_and_cache`, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.arguments import INTERPRETED
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.triton import functions as triton_ops


def random_kept(lens, keeps, num_kv_heads, width, seed=0):
    """Draw ascending survivors, other ones for each head, with -1 behind them."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.full((len(lens), num_kv_heads, width), -1, dtype=torch.int32)
    for r, (n, keep) in enumerate(zip(lens, keeps, strict=True)):
        for g in range(num_kv_heads):
            chosen = torch.randperm(n, generator=generator)[:keep].sort().values
            kept[r, g, :keep] = chosen.int()
    return kept


def bits_of(cache):
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])


@pytest.mark.parametrize(
    ("dtype", "head_size", "joint", "block_size"),
    [
        (torch.bfloat16, 64, False, 16),
        (torch.bfloat16, 80, True, 16),
        (torch.float32, 32, False, 8),
        (torch.float16, 128, True, 16),
        (torch.float8_e4m3fn, 128, False, 16),
        (torch.float8_e5m2, 80, True, 32),
    ],
)
def test_compact_is_gather_then_write(
    make_paged, ints, device, dtype, head_size, joint, block_size
):
    """Overlap in every way: all but one kept, most kept over several tiles, few kept, all kept."""
    lens, keeps = [300, 290, 150, 40, 33], [299, 200, 20, 40, 1]
    paged = make_paged(lens, 2, head_size, torch.float32, block_size=block_size, joint=joint)
    generator = torch.Generator().manual_seed(1)

    def random_bits(cache):
        # A copy in the layout of `cache` (same strides), of the dtype under test.
        storage = torch.randint(
            0,
            256,
            (cache.untyped_storage().nbytes() // 4 * dtype.itemsize,),
            generator=generator,
            dtype=torch.uint8,
        ).to(device)
        return storage.view(dtype).as_strided(cache.shape, cache.stride(), 0)

    if joint:
        wide = random_bits(paged.key_cache).as_strided(
            (*paged.key_cache.shape[:3], 2 * head_size), paged.key_cache.stride()
        )
        caches = [wide[..., :head_size], wide[..., head_size:]]
    else:
        caches = [random_bits(paged.key_cache), random_bits(paged.value_cache)]
    kept = random_kept(lens, keeps, 2, 310).to(device)
    originals = [bits_of(cache).clone() for cache in caches]
    expected = [original.clone() for original in originals]
    reference.compact(*expected, paged.block_table, kept, ints(lens), ints(keeps))
    triton_ops.compact(*caches, paged.block_table, kept, ints(lens), ints(keeps))
    for cache, bits, original in zip(caches, expected, originals, strict=True):
        assert torch.equal(bits_of(cache), bits)
        assert not torch.equal(bits, original)


@pytest.fixture
def pools(make_huge, device):
    """Return a pool whose blocks are 2**30 bytes apart, and one of the same bytes without gaps."""
    pool = make_huge(3 * 2**30 + 4096, torch.uint8).as_strided((4, 2, 16, 64), (2**30, 1024, 64, 1))
    data = torch.randint(0, 256, pool.shape, dtype=torch.uint8).to(device)
    return pool.copy_(data), data


def test_compact_beyond_32_bit_offsets(pools, ints, device):
    pool, data = pools
    kept = random_kept([60], [35], 2, 35).to(device)
    arguments = (ints([[3, 1, 2, 0]]), kept, ints([60]), ints([35]))
    value = data.clone()
    reference.compact(data, value.clone(), *arguments)
    triton_ops.compact(pool, value, *arguments)
    assert torch.equal(pool, data)
    assert torch.equal(value, data)


@pytest.mark.parametrize(
    ("dtype", "head_size", "block_size"),
    [(torch.bfloat16, 128, 16), (torch.float32, 80, 24), (torch.float8_e4m3fn, 256, 64)],
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copy_blocks(device, dtype, head_size, block_size, index):
    """Rows of a joint pool: K and V of two blocks arrive, and nothing else changes."""
    generator = torch.Generator().manual_seed(2)
    shape = (6, 3, block_size, 2 * head_size * dtype.itemsize)
    pool = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
    wanted, whole = pool.clone(), pool.view(dtype)
    sources, targets = (torch.tensor(x, dtype=index, device=device) for x in ([4, 0], [1, 5]))
    caches = whole[..., :head_size], whole[..., head_size:]
    triton_ops.copy_blocks(*caches, sources, targets)
    wanted[targets.long()] = wanted[sources.long()]
    assert torch.equal(pool, wanted)
    triton_ops.copy_blocks(*caches, sources[:0], targets[:0])  # nothing to copy
    assert torch.equal(pool, wanted)
    with pytest.raises(ValueError, match="sources and targets"):
        triton_ops.copy_blocks(*caches, sources, targets[:1])


def test_copy_blocks_beyond_32_bit_offsets(pools, ints):
    pool, data = pools
    data[3] = data[1]
    data[0] = data[2]
    triton_ops.copy_blocks(pool, torch.empty_like(data), ints([1, 2]), ints([3, 0]))
    assert torch.equal(pool, data)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "num_kv_heads", "head_size"),
    [
        (torch.bfloat16, torch.bfloat16, 2, 64),
        (torch.float32, torch.float32, 3, 80),
        (torch.float32, torch.bfloat16, 20, 64),  # several pieces a token
    ],
)
def test_reshape_and_cache(
    make_paged, ints, device, dtype, cache_dtype, num_kv_heads, head_size, joint
):
    paged = make_paged([40, 20], num_kv_heads, head_size, cache_dtype, joint=joint)
    caches = (paged.key_cache, paged.value_cache)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(9, 2 * num_kv_heads, head_size, generator=generator).to(dtype).to(device)
    if INTERPRETED:  # the interpreter truncates to bfloat16, hardware rounds
        fused = fused.to(cache_dtype).to(dtype)
    key, value = fused[:, :num_kv_heads], fused[:, num_kv_heads:]  # strided, as in a fused QKV
    slots = torch.tensor([3, -1, 17, 64, 0, -1, 5], device=device)
    expected = [cache.clone() for cache in caches]
    reference.reshape_and_cache(key, value, *expected, slots)
    triton_ops.reshape_and_cache(key, value, *caches, slots)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits_of(cache), bits_of(wanted))
    with pytest.raises(ValueError, match="20"):
        triton_ops.reshape_and_cache(key, value, *caches, torch.zeros(20, dtype=torch.int64))


def test_reshape_and_cache_beyond_32_bit_offsets(make_huge, device):
    flat = make_huge(2**31 + 4096, torch.bfloat16)
    pool = flat.as_strided((3, 1, 16, 64), (2**30, 64, 64, 1))
    key = torch.randn(2, 1, 64).bfloat16().to(device)
    small = torch.zeros(3, 1, 16, 64, dtype=torch.bfloat16, device=device)
    triton_ops.reshape_and_cache(
        key, key, pool, small, torch.tensor([2 * 16 + 5, 3], device=device)
    )
    assert torch.equal(pool[2, :, 5], key[0])
    assert torch.equal(pool[0, :, 3], key[1])
    assert torch.equal(small[2, :, 5], key[0])
