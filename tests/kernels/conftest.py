# SPDX-License-Identifier: Apache-2.0
"""Batches over a paged cache whose unused memory is poisoned, for the kernels' tests."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend, take_softmax
from tests.kernels.every_kernel import cpu, reference
from tests.kernels.readers import Reader, windows
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

    def windows(self, window: int) -> WindowBatch:
        return windows(self.attention(), window)


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
def check_attention(each_isa) -> Callable[..., None]:
    """Check on every instruction set: at most twice PyTorch's error in the dtype of the queries.

    `plain` is the same batch in float64, where the cache has 8-bit floats.
    """

    def check(batch: AttentionBatch, plain: AttentionBatch | None = None, **options: Any) -> None:
        softmax, plain = take_softmax(options, batch.query.shape[2] ** -0.5), plain or batch
        right, right_lse = attend(reference, plain, softmax, compute_dtype=torch.float64)
        rough, _ = attend(reference, plain, softmax, compute_dtype=batch.query.dtype)
        allowed = 2 * (rough - right).abs().max().item() + 2e-6
        for isa in each_isa():
            found, lse = attend(cpu, batch, softmax)
            error = (found - right).abs().max().item()
            assert error <= allowed, f"{isa}: error {error:.3g}, allowed {allowed:.3g}"
            torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)
            assert torch.equal(attend(cpu, batch, softmax, log_sum_exp=None)[0], found), isa
        if plain is not batch:
            found, lse = attend(reference, batch, softmax)
            torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)

    return check


@pytest.fixture
def check_reader(each_isa) -> Callable[..., torch.Tensor]:
    """Compare with float64 on every instruction set, with and without attention's log-sum-exp."""

    def check(
        reader: Reader, batch: AttentionBatch, plain: AttentionBatch | None = None, **options: Any
    ) -> torch.Tensor:
        softmax, plain = take_softmax(options, batch.query.shape[2] ** -0.5), plain or batch
        right = reader.run(reference, plain, softmax, **options, compute_dtype=torch.float64)

        def compare(module: Any, who: str, times: int = 1, **more: Any) -> None:
            found = reader.run(module, batch, softmax, **options, **more) * times
            torch.testing.assert_close(
                found, right, **reader.near, msg=lambda text: f"{who}: {text}"
            )
            assert not found[right == 0].any(), who

        _, lse = attend(reference, batch, softmax)
        for isa in each_isa():
            compare(cpu, isa)
            compare(cpu, isa, log_sum_exp=attend(cpu, batch, softmax)[1])
        compare(reference, "reference", log_sum_exp=lse)
        if plain is not batch:
            compare(reference, "reference")
        if softmax.sinks is None and options.get("kind") != "below_average":
            for module in (cpu, reference):  # a larger one halves every weight
                compare(module, "doubled", 2, log_sum_exp=lse + math.log(2))
        return right

    return check


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
