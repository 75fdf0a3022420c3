# SPDX-License-Identifier: Apache-2.0
"""Shared by the `check_*.py` modules of this folder, which `tests/kernels/test_triton_matrix.py`
runs.

Pytest does not collect them by itself: Triton decides at import whether it interprets, so they need
a process of their own (`TRITON_INTERPRET=1` for CPU tensors, a CUDA device without it).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from tests.plumbing.interpreter import quicken
from vllm_pyramid.kernels.records import AttentionBatch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
if DEVICE == "cpu":
    quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("cpu"):
            item.add_marker("cpu" if DEVICE == "cpu" else "gpu")


@dataclass
class Paged:
    """A pool in which only the requests' own rows are numbers and all else is NaN."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    garbage_block: int

    def attention(
        self,
        query: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        skips: torch.Tensor,
        **maxima: int | None,
    ) -> AttentionBatch:
        """Return queries `[T, H, D]` of the requests, with the other fields of a batch."""
        caches = (self.key_cache, self.value_cache)
        return AttentionBatch(query, *caches, self.block_table, starts, lens, skips, **maxima)

    def batch(
        self,
        counts: list[int],
        lens: list[int],
        skips: list[int] | None = None,
        *,
        group: int = 4,
        seed: int = 1,
        dtype: torch.dtype | None = None,
        padding: int = 0,
        **maxima: int | None,
    ) -> AttentionBatch:
        """Return random queries, as many of each request as `counts` says, then `padding`."""
        _, heads, _, size = self.key_cache.shape
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(sum(counts) + padding, heads * group, size, generator=generator)
        query = query.to(dtype or self.key_cache.dtype).to(DEVICE)
        numbers = ([0, *accumulate(counts)], lens, skips or [0] * len(lens))
        return self.attention(query, *map(as_ints, numbers), **maxima)


def as_ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def build_paged(
    lens: list[int],
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    block_size: int = 16,
    joint: bool = False,
    seed: int = 0,
    skips: Sequence[int] = (),
) -> Paged:
    """Put random K and V of the given lengths on physical blocks in random order.

    `joint` keeps K and V in one row of one allocation, else each is `[P, N, G, D]` on its own.
    Table entries of whole blocks below `skips` are stale.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    garbage = order.pop()
    if joint:
        pool = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_size), float("nan"))
        pool = pool.to(dtype).to(DEVICE)
        key_cache, value_cache = pool[..., :head_size], pool[..., head_size:]
    else:
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        key_cache, value_cache = (
            torch.full(shape, float("nan")).to(dtype).to(DEVICE).transpose(1, 2) for _ in "kv"
        )
    table = torch.full((len(lens), max(counts) + 2), garbage, dtype=torch.int32)
    for r, (n, count) in enumerate(zip(lens, counts, strict=True)):
        table[r, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        for p in range(0, n, block_size):
            rows = min(block_size, n - p)
            for cache in (key_cache, value_cache):
                data = torch.randn(num_kv_heads, rows, head_size, generator=generator)
                cache[table[r, p // block_size], :, :rows] = data.to(dtype).to(DEVICE)
    for r, skip in enumerate(skips):
        table[r, : skip // block_size] = garbage
    return Paged(key_cache, value_cache, table.to(DEVICE), garbage)


def allocate_huge(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of address space; on the CPU only touched pages cost memory."""
    if DEVICE == "cuda":
        return torch.empty(num_elements, dtype=dtype, device=DEVICE)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the name is new in Python 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def make_paged() -> Callable[..., Paged]:
    return build_paged


@pytest.fixture
def make_huge() -> Callable[[int, torch.dtype], torch.Tensor]:
    return allocate_huge


@pytest.fixture
def far_pools() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`far_pools(blocks, width)`: two pools `[blocks, 1, 16, width]` of the same bfloat16.

    Blocks of the first are `stride` elements apart.
    """

    def make(blocks: int, width: int, stride: int = 2**30) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, 1, 16, width)
        flat = allocate_huge((blocks - 1) * stride + 4096, torch.bfloat16)
        far = flat.as_strided(shape, (stride, 1, width, 1))
        near = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
        return far.copy_(near), near

    return make


@pytest.fixture
def ints() -> Callable[[list[int]], torch.Tensor]:
    """Return a function that makes int32 tensors on the device under test."""
    return as_ints
