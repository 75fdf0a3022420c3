# SPDX-License-Identifier: Apache-2.0
"""Batches over a paged cache whose unused memory is poisoned, for the kernels' tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.cpu.library import ISA_VARIABLE, isas
from vllm_pyramid.kernels.records import AttentionBatch, WindowBatch

STALE_BLOCK = 10**6  # an id far outside every pool: reading the entry is an error or a crash


@dataclass
class Batch:
    """Parts of an `AttentionBatch` and a `WindowBatch`, which a test may change."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor

    def attention(self) -> AttentionBatch:
        return AttentionBatch(**vars(self))

    def one(self, r: int) -> Batch:
        """Return request r by itself."""
        (begin, end), one = self.query_start_loc[r : r + 2].tolist(), slice(r, r + 1)
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        caches = (self.query[begin:end], self.key_cache, self.value_cache)
        return Batch(*caches, self.block_table[one], starts, self.seq_lens[one], self.skips[one])

    def windows(self, window: int, max_prompt_len: int | None = None) -> WindowBatch:
        """Return the last queries of the requests, whose prompts end in this step."""
        inputs = (self.query, self.key_cache, self.block_table, self.query_start_loc[1:])
        return WindowBatch(*inputs, self.seq_lens, window, max_prompt_len)


def build_batch(
    lens: list[int],
    query_lens: list[int],
    *,
    skips: list[int] | None = None,
    kv_heads: int = 2,
    group: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "planes",
    seed: int = 0,
) -> Batch:
    """Make a batch with permuted blocks, stale table heads, and NaN where no visible token is.

    Args:
        layout: "planes" (`[P, G, 2N, D]`, K above V) or "rows" (`[P, G, N, 2D]`, K next to V).
    """
    generator = torch.Generator().manual_seed(seed)
    skips = skips or [0] * len(lens)
    entries = max(-(-n // block_size) for n in lens) + 1
    blocks = len(lens) * entries + 3
    shape = (blocks, kv_heads)
    if layout == "planes":
        memory = torch.full((*shape, 2 * block_size, head_size), float("nan"), dtype=dtype)
        key_cache, value_cache = memory[:, :, :block_size], memory[:, :, block_size:]
    else:
        memory = torch.full((*shape, block_size, 2 * head_size), float("nan"), dtype=dtype)
        key_cache, value_cache = memory[..., :head_size], memory[..., head_size:]
    order = torch.randperm(blocks, generator=generator)
    table = order[: len(lens) * entries].view(len(lens), entries).to(torch.int32)
    for r, (n, skip) in enumerate(zip(lens, skips, strict=True)):
        positions = torch.arange(skip, n)
        ids, rows = table[r, positions // block_size].long(), positions % block_size
        for cache in (key_cache, value_cache):
            values = torch.randn(n - skip, kv_heads, head_size, generator=generator)
            cache[ids, :, rows] = values.to(dtype)
        table[r, : skip // block_size] = STALE_BLOCK
        table[r, -(-n // block_size) :] = -1
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    query = torch.randn(
        int(starts[-1]), kv_heads * group, head_size, generator=generator, dtype=torch.float32
    ).to(dtype)
    return Batch(
        query,
        key_cache,
        value_cache,
        table,
        starts,
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(skips, dtype=torch.int32),
    )


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return build_batch


@pytest.fixture
def each_isa() -> Iterator[Callable[[], Iterator[str]]]:
    """Yield each instruction set of this CPU after selecting it, or the one that is forced."""
    forced, before = os.environ.get(ISA_VARIABLE), cpu.current_isa()

    def walk() -> Iterator[str]:
        for isa in [forced] if forced else isas():
            cpu.set_isa(isa)
            yield isa

    yield walk
    cpu.set_isa(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
