# SPDX-License-Identifier: Apache-2.0
"""The C++ scores of `observed_expected` against the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import head_sinks
from tests.kernels.every_kernel import cpu, reference
from vllm_pyramid.kernels.records import FP8_DTYPES, Softmax, WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape

LENS, STARTS = [1100, 57, 300], [0, 11, 150]
SHAPE = ScoreShape(sinks=4, window=24, kernel_size=21, expected=0.25)


@dataclass(frozen=True)
class Scored:
    """The arguments of `observed_expected_scores`."""

    batch: WindowBatch
    values: torch.Tensor
    softmax: Softmax
    shape: ScoreShape
    future: torch.Tensor | None
    starts: torch.Tensor | None = None

    def by(self, module: Any, **more: Any) -> torch.Tensor:
        arguments = (self.batch, self.values, self.softmax, self.shape)
        found: torch.Tensor = module.observed_expected_scores(
            *arguments, future=self.future, starts=self.starts, **more
        )
        return found

    def row(self, r: int) -> Scored:
        """Return one of the requests by itself, as wide as its own tokens."""
        one, batch = slice(r, r + 1), self.batch
        alone = replace(
            batch,
            block_table=batch.block_table[one],
            query_ends=batch.query_ends[one],
            prompt_lens=batch.prompt_lens[one],
            max_prompt_len=None,
        )
        future = None if self.future is None else self.future[one]
        starts = None if self.starts is None else self.starts[one]
        return replace(self, batch=alone, future=future, starts=starts)


@pytest.fixture
def made(make_batch) -> Callable[..., Scored]:
    """Make requests with NaN where no token is, and queries of a head that are alike."""

    def make(
        lens: list[int] = LENS,
        starts: list[int] = STARTS,
        *,
        queries: int = 16,
        shape: ScoreShape = SHAPE,
        soft_cap: float = 0.0,
        learned: bool = False,
        **options: Any,
    ) -> Scored:
        counts = [queries + gap for gap in range(len(lens))]
        batch = make_batch(lens, counts, skips=starts, **options)
        heads, size = batch.query.shape[1:]
        generator = torch.Generator().manual_seed(1)
        future = torch.randn(len(lens), heads, queries, size, generator=generator) / 2
        future += torch.randn(heads, 1, size, generator=generator)
        return Scored(
            batch.windows(queries),
            batch.value_cache,
            Softmax(size**-0.5, soft_cap, sinks=head_sinks(heads) if learned else None),
            shape,
            future if shape.expected else None,
            batch.skips if any(starts) else None,
        )

    return make


@pytest.fixture
def check(each_isa) -> Callable[[Scored], torch.Tensor]:
    """Compare with the reference in float64, and return what it says."""

    def compare(scored: Scored) -> torch.Tensor:
        right = scored.by(reference, compute_dtype=torch.float64)
        shape, lens = scored.shape, scored.batch.prompt_lens.tolist()
        starts = [0] * len(lens) if scored.starts is None else scored.starts.tolist()
        for isa in each_isa():
            found = scored.by(cpu)
            # The dot products of bfloat16 sum in an order of their own.
            torch.testing.assert_close(
                found, right, rtol=1e-4, atol=1e-9, msg=lambda text, isa=isa: f"{isa}: {text}"
            )
            for row, start, n in zip(found, starts, lens, strict=True):
                assert row[:, :start].isneginf().all() and row[:, n:].isneginf().all()
                assert not row[:, start : min(start + shape.sinks, n)].any()
                assert not row[:, max(start, n - shape.window) : n].any()
        return right

    return compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("head_size", [64, 128, 40])
def test_scores(made, check, dtype, group, head_size) -> None:
    check(made(dtype=dtype, group=group, head_size=head_size, layout="rows"))


def test_both_parts_matter(made, check) -> None:
    scored = made()
    right = check(scored)
    sums = right[0, :, 4:1076].sum(dim=-1)
    torch.testing.assert_close(sums, torch.full_like(sums, 1.25), rtol=1e-5, atol=0)
    alone = replace(scored, shape=replace(SHAPE, expected=0.0), future=None)
    assert (check(alone) - right).nan_to_num(0.0).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_heads(made, check, dtype) -> None:
    check(made(dtype=dtype, group=4, head_size=512))


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learned_sinks_and_caps(made, check, dtype, soft_cap) -> None:
    """Give each head of a group another sink, which has a part in both softmaxes."""
    scored = made(dtype=dtype, group=4, soft_cap=soft_cap, learned=True)
    right = check(scored)
    turned = replace(scored.softmax, sinks=scored.softmax.sinks.flip(0).contiguous())
    other = replace(scored, softmax=turned).by(cpu)
    assert (other - right).nan_to_num(0.0).abs().max() > 1e-4
    if soft_cap:
        plain = replace(scored, softmax=replace(scored.softmax, soft_cap=0.0)).by(cpu)
        assert (plain - right).nan_to_num(0.0).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("queries", "shape"),
    [
        (1, ScoreShape(0, 1, 1, 0.25)),
        (5, ScoreShape(1, 7, 63, 2.0)),
        (80, ScoreShape(4, 90, 21, 1.0)),
        (16, ScoreShape(0, 16, 1023, 0.25)),
    ],
)
def test_windows_and_widths(made, check, two_threads, queries, shape) -> None:
    lens = [1025, 65 + queries, 2048]
    check(made(lens, [0, 3, 130], queries=queries, shape=shape, group=3))


def test_first_tokens_of_more_than_an_item(made, check) -> None:
    check(made([2100], [5], shape=ScoreShape(1100, 30, 21, 0.25)))


@pytest.mark.parametrize("sinks", [4, 40])
def test_nothing_between_the_first_and_last_tokens(made, check, sinks) -> None:
    """Score requests of which all tokens stay, one of them with nothing but its queries."""
    right = check(made([40, 47, 90], [0, 31, 0], shape=ScoreShape(sinks, 44, 21, 0.25)))
    assert not right[0, :, :40].any() and not right[1, :, 31:47].any()


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_of_8_bit_floats(made, check, each_isa, fp8, dtype) -> None:
    scored = made(dtype=torch.float32, group=3, learned=True)
    keys = (scored.batch.key_cache / 0.37).to(fp8)
    query = scored.batch.query.to(dtype)
    batch = replace(scored.batch, query=query, key_cache=keys, key_scale=0.37)
    stored = replace(scored, batch=batch, values=scored.values.to(fp8))
    right = check(stored)
    plain = replace(batch, key_cache=keys.float() * 0.37, key_scale=1.0)
    same = replace(stored, batch=plain, values=stored.values.float())
    torch.testing.assert_close(same.by(reference), right, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_and_its_threads_change_no_bit(made, each_isa, two_threads, dtype) -> None:
    """Score a request alone, beside others, in wider rows, and elsewhere in its table."""
    scored = made([1100, 57, 2500], [0, 11, 0], dtype=dtype, group=3)
    for isa in each_isa():
        together = scored.by(cpu)
        for r, n in enumerate([1100, 57, 2500]):
            alone = scored.row(r)
            torch.set_num_threads(1)
            assert torch.equal(alone.by(cpu)[0], together[r, :, :n]), isa
            torch.set_num_threads(2)
            wide = replace(alone, batch=replace(alone.batch, max_prompt_len=3000))
            assert torch.equal(wide.by(cpu)[0, :, :n], together[r, :, :n]), isa


def test_the_place_in_the_table_changes_no_bit(made, each_isa) -> None:
    moved, shift = made([700, 300], [5, 9], layout="rows"), 37
    batch, lens = moved.batch, moved.batch.prompt_lens + shift
    size = batch.key_cache.shape[2]
    blocks = -(-int(lens.max()) // size) + 1
    table = torch.arange(2 * blocks, dtype=torch.int32).view(2, blocks)
    shape = (2 * blocks, *batch.key_cache.shape[1:])
    caches = [torch.full(shape, math.nan) for _ in "kv"]
    for r, (start, n) in enumerate([(5, 700), (9, 300)]):
        old, new = torch.arange(start, n), torch.arange(start, n) + shift
        for cache, source in zip(caches, (batch.key_cache, moved.values), strict=True):
            rows = source[batch.block_table[r, old // size].long(), :, old % size]
            cache[table[r, new // size].long(), :, new % size] = rows
    there = replace(
        moved,
        batch=replace(batch, key_cache=caches[0], block_table=table, prompt_lens=lens),
        values=caches[1],
        starts=moved.starts + shift,
    )
    for isa in each_isa():
        here, elsewhere = moved.by(cpu), there.by(cpu)
        for r, n in enumerate([700, 300]):
            assert torch.equal(here[r, :, :n], elsewhere[r, :, shift : n + shift]), isa


def test_scores_without_room_for_the_weights(made, each_isa) -> None:
    """Compare weights that are kept with more than 64 MiB, which are computed twice: same bits."""
    scored = made([2100, 1900], [0, 7], queries=64, shape=ScoreShape(4, 64), group=8, head_size=32)
    repeated, batch = torch.tensor([0, 1] * 10), scored.batch
    many = replace(
        scored,
        batch=replace(
            batch,
            block_table=batch.block_table[repeated].contiguous(),
            query_ends=batch.query_ends[repeated].contiguous(),
            prompt_lens=batch.prompt_lens[repeated].contiguous(),
        ),
        future=scored.future[repeated].contiguous(),
        starts=scored.starts[repeated].contiguous(),
    )
    for isa in each_isa():
        found, alone = many.by(cpu), [scored.row(r).by(cpu)[0] for r in range(2)]
        for i, r in enumerate(repeated.tolist()):
            assert torch.equal(found[i, :, : alone[r].shape[1]], alone[r]), isa


def test_values_of_zeros(made, check) -> None:
    """Divide by 1e-30 at least."""
    scored = made([90], [0])
    scored.values.zero_()
    assert not check(scored).any()


@pytest.mark.parametrize("expected", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0}, {"learned": True}])
def test_nan(made, each_isa, options, dtype, expected) -> None:
    """A key that is NaN spoils its head, a value only where it is scored or pooled."""
    shape = ScoreShape(4, 12, 5, expected)
    lens = [300, 1300, 95, 700]
    scored = made(lens, [0] * 4, queries=8, shape=shape, group=4, dtype=dtype, **options)
    whole = {isa: scored.by(cpu) for isa in each_isa()}

    def spoil(cache: torch.Tensor, request: int, positions: range) -> None:
        for position in positions:
            block = int(scored.batch.block_table[request, position // 16])
            cache[block, 0, position % 16] = torch.nan

    spoil(scored.batch.key_cache, 0, range(299, 300))  # the last query alone sees it
    spoil(scored.batch.key_cache, 1, range(512, 700))  # whole tiles
    spoil(scored.values, 2, range(50, 51))
    spoil(scored.values, 3, range(1))  # too far from the tokens that are scored
    spoil(scored.values, 3, range(690, 691))  # of the window
    right = scored.by(reference)
    wrong = right.isnan()
    assert wrong[:3, 0].any(-1).all() and not wrong[3].any() and not wrong[:, 1].any()
    for isa in each_isa():
        found = scored.by(cpu)
        assert torch.equal(found.isnan(), wrong), isa
        assert torch.equal(found[~wrong], whole[isa][~wrong]), isa
