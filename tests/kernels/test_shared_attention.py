# SPDX-License-Identifier: Apache-2.0
"""Attention that reads shared prefixes once: C++ on every instruction set, and the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend, head_sinks, softmax_of
from tests.kernels.conftest import Batch, build_batch
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.cpu.library import shared_rows
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Softmax
from vllm_pyramid.kernels.reference_attention import SharedPrefix, shared_prefixes

# Two groups with unequal rests, several queries among them; a prompt, requests that share nothing,
# a request without queries, and one that shares its first page alone.
LENS = [700, 690, 1300, 672, 300, 37, 400, 330, 450, 20, 90, 660, 700, 701, 800]
QUERY_LENS = [1, 2, 1, 1, 300, 5, 1, 1, 1, 0, 1, 1, 1, 1, 1]
LARGE, SMALL = (0, 1, 2, 3, 11, 12, 13, 14), (6, 7, 8)
GROUPS = [(LARGE, 656), (SMALL, 320), ((5, 10), 16)]
FEWEST = 128


def share(batch: Batch, groups: Sequence[tuple[Sequence[int], int]]) -> Batch:
    """Let the tables of each group begin with the same blocks: those of its first request."""
    block_size = batch.key_cache.shape[2]
    for requests, end in groups:
        first = int(batch.skips[requests[0]]) // block_size
        for r in requests[1:]:
            pages = slice(first, end // block_size)
            batch.block_table[r, pages] = batch.block_table[requests[0], pages]
    return batch


def shared(
    batch: AttentionBatch, softmax: Softmax, fewest_keys: int = FEWEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in C++, with shared prefixes of `fewest_keys` keys at least."""
    out, lse = torch.full(batch.query.shape, 7.0), torch.full(batch.query.shape[:2], 9.0)
    cpu.shared_attention(out, batch, softmax, log_sum_exp=lse, fewest_keys=fewest_keys)
    return out, lse


def rows_of(batch: AttentionBatch, groups: Sequence[SharedPrefix]) -> int:
    queries = batch.query_start_loc.diff()
    return sum(int(queries[list(group.requests)].sum()) for group in groups) * batch.query.shape[1]


def rows_alone(batch: AttentionBatch, groups: Sequence[SharedPrefix]) -> torch.Tensor:
    """Return `[T]`, whether a query's request is in no group."""
    grouped = {r for group in groups for r in group.requests}
    alone = torch.tensor([r not in grouped for r in range(len(batch.seq_lens))])
    return alone.repeat_interleave(batch.query_start_loc.diff().long())


@pytest.fixture
def check(each_isa) -> Callable[..., list[SharedPrefix]]:
    """Check on every instruction set: sharing ran, and errs by at most twice PyTorch's error."""

    def run(
        batch: AttentionBatch, plain: AttentionBatch | None = None, **options: Any
    ) -> list[SharedPrefix]:
        softmax = softmax_of(batch, **options)
        right, right_lse = attend(reference, plain or batch, softmax, compute_dtype=torch.float64)
        rough, _ = attend(reference, plain or batch, softmax, compute_dtype=batch.query.dtype)
        allowed = 2 * (rough - right).abs().max().item() + 2e-6
        groups = shared_prefixes(batch, softmax, FEWEST)
        alone = rows_alone(batch, groups)
        for isa in each_isa():
            before = shared_rows()
            found, lse = shared(batch, softmax)
            assert shared_rows() - before == rows_of(batch, groups), isa
            error = (found - right).abs().max().item()
            assert error <= allowed, f"{isa}: error {error:.3g}, allowed {allowed:.3g}"
            torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)
            by_itself, own_lse = attend(cpu, batch, softmax)
            assert torch.equal(found[alone], by_itself[alone]), isa
            assert torch.equal(lse[alone], own_lse[alone]), isa
        by_reference = torch.full(batch.query.shape, 7.0, dtype=torch.float64)
        twin_lse = torch.full(batch.query.shape[:2], 9.0)
        reference.shared_attention(
            *(by_reference, batch, softmax),
            log_sum_exp=twin_lse,
            fewest_keys=FEWEST,
            compute_dtype=torch.float64,
        )
        torch.testing.assert_close(by_reference, right, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(twin_lse, right_lse, rtol=1e-6, atol=1e-6)
        return groups

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("group", "head_size", "pays"),
    [
        *((1, 64, (LARGE, SMALL)), (1, 512, (LARGE, SMALL))),
        *((2, 40, (SMALL,)), (3, 64, ())),  # 18 and 27 rows, of requests of up to 4 and 6
        *((4, 64, (LARGE,)), (5, 128, (LARGE,)), (8, 32, (LARGE,))),
    ],
)
def test_groups_and_others_in_one_batch(check, dtype, group, head_size, pays) -> None:
    shape = {"dtype": dtype, "group": group, "head_size": head_size, "seed": group + head_size}
    batch = share(build_batch(LENS, QUERY_LENS, **shape), GROUPS)
    groups = check(batch.attention())
    assert {group.requests: group.end for group in groups} == {
        requests: 640 if requests == LARGE else 320 for requests in pays
    }


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4])
def test_caches_of_8_bit_floats(check, fp8, dtype, group) -> None:
    batch = share(build_batch(LENS, QUERY_LENS, dtype=dtype, group=group), GROUPS).attention()
    eight = replace(
        batch,
        key_cache=(batch.key_cache.float() / 0.37).to(fp8),
        value_cache=batch.value_cache.to(fp8),
        key_scale=0.37,
        value_scale=2.5,
    )
    plain = replace(
        eight,
        key_cache=eight.key_cache.double() * 0.37,
        value_cache=eight.value_cache.double() * 2.5,
        key_scale=1.0,
        value_scale=1.0,
    )
    assert len(check(eight, plain)) == (2 if group == 1 else 1)


@pytest.mark.parametrize("options", [{"soft_cap": 1.5}, {"sinks": head_sinks(8)}])
@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("block_size", [8, 16, 48])
def test_options_and_layouts(check, options, layout, block_size) -> None:
    shape = {"layout": layout, "block_size": block_size, "dtype": torch.bfloat16, "group": 4}
    batch = share(build_batch(LENS, QUERY_LENS, **shape), GROUPS)
    assert len(check(batch.attention(), **options)) == 1


def test_a_sliding_window_shares_nothing(check) -> None:
    batch = share(build_batch(LENS, QUERY_LENS, group=4), GROUPS)
    assert check(batch.attention(), sliding_window=100) == []


def test_lists_of_each_kv_head_share_nothing(each_isa) -> None:
    """Attend to chosen pages: the same lists of two KV heads give the bits of `paged_attention`."""
    batch = share(build_batch(LENS, QUERY_LENS, group=4), GROUPS).attention()
    lists = replace(batch, block_table=batch.block_table[:, None].expand(-1, 2, -1).contiguous())
    softmax = softmax_of(batch)
    assert shared_prefixes(lists, softmax, FEWEST) == []
    for _ in each_isa():
        before = shared_rows()
        found, right = shared(lists, softmax), attend(cpu, batch, softmax)
        assert shared_rows() == before
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_equal_skips_share_and_others_do_not(check) -> None:
    """Let survivors be in shared blocks: they are the same tokens only behind the same skip."""
    skips = [150, 150, 150, 147, 150, 0, 0]
    made = build_batch([700, 650, 900, 650, 700, 500, 650], [1] * 7, skips=skips)
    batch = share(made, [((3, 0, 1, 2), 640)])
    assert check(batch.attention()) == [((0, 1, 2), 150, 150 + 448)]


def test_prefixes_within_prefixes(check) -> None:
    """Form the groups that save the most, whichever level they are on."""
    lens, ones = [900, 850, 870, 860, 950, 910], [1] * 6
    deep = share(build_batch(lens, ones), [(range(6), 128), ((0, 2, 4), 832), ((1, 3, 5), 832)])
    assert sorted(check(deep.attention())) == [((0, 2, 4), 0, 832), ((1, 3, 5), 0, 832)]
    wide = share(build_batch(lens, ones), [(range(6), 640), ((0, 2), 832)])
    assert check(wide.attention()) == [(tuple(range(6)), 0, 640)]
    # A request that ends inside the prefix of the others.
    short = share(build_batch([900, 850, 210], ones[:3]), [((0, 1), 832), ((0, 2), 208)])
    assert check(short.attention()) == [((0, 1), 0, 832)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_a_tile(check, two_threads, dtype) -> None:
    """Serve 40 requests of 8 heads, which are two tiles, over a prefix of several parts."""
    lens = [1217 + 3 * r for r in range(40)]
    batch = share(build_batch(lens, [1] * 40, group=8, dtype=dtype), [(range(40), 1216)])
    assert check(batch.attention()) == [(tuple(range(40)), 0, 1216)]


def tree_of(seed: int) -> Batch:
    """Make a batch whose tables agree with those of earlier requests up to random pages."""
    source = random.Random(seed)
    count = source.randint(2, 24)
    lens = [source.randint(1, 400) + 400 * (r < 4) for r in range(count)]
    queries = [min(n, source.choice([0, 2, 40] + [1] * 9)) for n in lens]
    batch = build_batch(
        *(lens, queries),
        group=source.choice([1, 4]),
        block_size=source.choice([8, 16]),
        head_size=32,
        seed=seed,
    )
    for r in range(1, count):
        like = source.randrange(min(r, 4))
        end = min(lens[like], lens[r] - queries[r])
        if source.random() < 0.8:
            share(batch, [((like, r), source.randint(end // 2, end))])
    return batch


@pytest.mark.parametrize("seed", range(12))
def test_random_trees_of_prefixes(check, seed) -> None:
    check(tree_of(seed).attention())


def test_the_random_trees_hold_groups() -> None:
    found = []
    for seed in range(12):
        batch = tree_of(seed).attention()
        found += shared_prefixes(batch, softmax_of(batch), FEWEST)
    assert len(found) > 5 and max(len(group.requests) for group in found) > 2


def reordered(batch: AttentionBatch, order: list[int]) -> tuple[AttentionBatch, torch.Tensor]:
    """Put the requests into another order; also returns where each query row came from."""
    starts = batch.query_start_loc.tolist()
    rows = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in order])
    lens = torch.tensor([0, *(starts[r + 1] - starts[r] for r in order)])
    moved = replace(
        batch,
        query=batch.query[rows],
        block_table=batch.block_table[order],
        query_start_loc=lens.cumsum(0).to(torch.int32),
        seq_lens=batch.seq_lens[order],
        skips=batch.skips[order],
    )
    return moved, rows


def test_order_and_threads_do_not_matter(each_isa, two_threads) -> None:
    batch = share(build_batch(LENS, QUERY_LENS, group=4), GROUPS).attention()
    softmax, order = softmax_of(batch), list(range(len(LENS)))
    random.Random(1).shuffle(order)
    other, rows = reordered(batch, order)
    for _ in each_isa():
        torch.set_num_threads(2)
        out, lse = shared(batch, softmax)
        torch.set_num_threads(1)
        assert torch.equal(shared(batch, softmax)[0], out)
        before = shared_rows()
        moved, moved_lse = shared(other, softmax)
        assert shared_rows() - before == 9 * 8
        torch.testing.assert_close(moved, out[rows], rtol=0, atol=2e-6)
        torch.testing.assert_close(moved_lse, lse[rows], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("part", ["key_cache", "value_cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_reaches_those_who_see_it(each_isa, part, dtype) -> None:
    """Put NaN into a shared page, then into a page of one request alone."""
    whole = share(build_batch([700] * 9, [1] * 9, group=4, dtype=dtype), [(range(8), 656)])
    softmax = softmax_of(whole.attention())
    for request, entry, hurt in ((0, 3, range(8)), (5, 42, [5])):
        batch = replace(whole, **{part: getattr(whole, part).clone()})
        getattr(batch, part)[int(batch.block_table[request, entry]), :, 7] = float("nan")
        for isa in each_isa():
            before = shared_rows()
            out, _ = shared(batch.attention(), softmax)
            assert shared_rows() - before == 8 * 8
            found = out.isnan().flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert found == list(hurt), isa


def test_few_keys_are_not_worth_a_group(each_isa) -> None:
    """Form a group from exactly `fewest_keys` on; with one more, all bits are those of today."""
    batch = share(build_batch([700, 690, 1300], [1] * 3), [((0, 1, 2), 656)]).attention()
    softmax = softmax_of(batch)
    for _ in each_isa():
        before = shared_rows()
        unshared = shared(batch, softmax, 641)
        assert shared_rows() == before
        for found, right in zip(unshared, attend(cpu, batch, softmax), strict=True):
            assert torch.equal(found, right)
        shared(batch, softmax, 640)
        assert shared_rows() - before == 3 * 4


@pytest.mark.parametrize("module", [cpu, reference])
def test_a_group_must_save_something(module) -> None:
    batch = build_batch([100, 95], [4, 1]).attention()
    with pytest.raises(ValueError, match="fewest_keys is 0"):
        module.shared_attention(torch.empty(5, 4, 64), batch, Softmax(1.0), fewest_keys=0)


def test_nothing_is_written_without_requests() -> None:
    batch = build_batch([100], [1]).attention()
    none = torch.zeros(0, dtype=torch.int32)
    empty = replace(
        batch, query=batch.query[:0], query_start_loc=none.new_zeros(1), seq_lens=none, skips=none
    )
    for module in (cpu, reference):
        module.shared_attention(torch.empty(0, 4, 64), empty, Softmax(1.0))
