# SPDX-License-Identifier: Apache-2.0
"""A key that is NaN: what follows from it is NaN on every instruction set, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend
from tests.kernels.every_kernel import cpu, reference
from vllm_pyramid.kernels.records import Reduction, Softmax
from vllm_pyramid.methods.pages.kernels import cpu as page_cpu
from vllm_pyramid.methods.pages.kernels import reference as page_reference
from vllm_pyramid.methods.pages.kernels.records import SUMMARY_ROWS, PageBatch
from vllm_pyramid.methods.thinning.kernels import RecentBatch

NAN, NEGATIVE_NAN = 0x7FC00000, -0x400000  # the processor's own is negative
LENS = [300, 1300, 700, 95, 60]
QUERY_LENS = [90, 1, 1, 4, 60]
SCALE = 0.125
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": torch.linspace(0.5, 2.0, 8)},
    "sliding window": {"sliding_window": 70},
}


def _nan(bits: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(dtype)


def spoil(batch: Any, request: int, positions: range, bits: int = NAN) -> None:
    """Make keys of one request NaN, in its first KV head alone."""
    size = batch.key_cache.shape[2]
    for position in positions:
        block = int(batch.block_table[request, position // size])
        batch.key_cache[block, 0, position % size] = _nan(bits, batch.key_cache.dtype)


def check(each_isa, run: Callable[[Any], tuple[torch.Tensor, ...]], spoiling: Callable[[], None]):
    """Check that results are NaN where the reference's are, and elsewhere what they were before.

    Args:
        run: of a back end. spoiling: what happens to the batch.
    """
    whole = {isa: run(cpu) for isa in each_isa()}
    spoiling()
    right = run(reference)
    for isa in each_isa():
        for found, expected, before in zip(run(cpu), right, whole[isa], strict=True):
            wrong = expected.isnan()
            assert wrong.any(), "the test spoils nothing"
            assert torch.equal(found.isnan(), wrong), isa
            assert torch.equal(found[~wrong], before[~wrong]), isa


@pytest.mark.parametrize("bits", [NAN, NEGATIVE_NAN])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [(torch.float32, 64), (torch.float32, 40), (torch.bfloat16, 128), (torch.float16, 64)],
)
def test_attention(make_batch, each_isa, dtype, head_size, option, bits) -> None:
    softmax = Softmax(SCALE, **OPTIONS[option])
    batch = make_batch(LENS, QUERY_LENS, group=4, dtype=dtype, head_size=head_size)

    def spoiling() -> None:
        spoil(batch, 0, range(250, 251), bits)  # some queries of a chunk do not see it
        spoil(batch, 1, range(1290, 1291), bits)  # one part of a request that is split
        spoil(batch, 3, range(95), bits)  # all that a request sees

    check(each_isa, lambda module: attend(module, batch.attention(), softmax), spoiling)


def test_a_part_in_which_every_key_is_nan(make_batch, each_isa) -> None:
    """Split a request's keys among threads: a part without any number has no maximum."""
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch([1300, 1300], [1, 1], group=8, dtype=dtype, head_size=64)
        spoil(batch, 0, range(600))
        right, _ = attend(reference, batch.attention(), Softmax(SCALE))
        for isa in each_isa():
            found, _ = attend(cpu, batch.attention(), Softmax(SCALE))
            assert torch.equal(found.isnan(), right.isnan()), isa


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_a_part_that_a_row_does_not_see(make_batch, each_isa, soft_cap, scale) -> None:
    """Split 513 keys into parts of 512 and 1, which the first query does not see: no NaN."""
    softmax = Softmax(scale, soft_cap=soft_cap)
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch([513], [2], group=4, dtype=dtype, head_size=96)
        right, _ = attend(reference, batch.attention(), softmax)
        for isa in each_isa():
            found, _ = attend(cpu, batch.attention(), softmax)
            assert (found - right).abs().max() < 0.03, isa


def test_infinity(make_batch, each_isa) -> None:
    batch = make_batch(LENS, QUERY_LENS, group=4)
    blocks = batch.block_table[:, 1].long()
    batch.key_cache[blocks, 0, 3, 5] = torch.inf
    right, _ = attend(reference, batch.attention(), Softmax(SCALE))
    assert right.isnan().any()
    for isa in each_isa():
        found, _ = attend(cpu, batch.attention(), Softmax(SCALE))
        assert torch.equal(found.isnan(), right.isnan()), isa


def choose(module: Any, batch: Any, softmax: Softmax, renormalize: bool) -> torch.Tensor:
    out = torch.empty(batch.query.shape)
    top_ns = torch.tensor([0, 16, 5, 9, 0], dtype=torch.int32)
    module.topn_attention(out, batch.attention(), softmax, top_ns, renormalize=renormalize)
    return out


@pytest.mark.parametrize("bits", [NAN, NEGATIVE_NAN])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_best_keys(make_batch, each_isa, option, renormalize, bits) -> None:
    """NaN is among the best keys, wherever it is, as in the reference."""
    softmax = Softmax(SCALE, **OPTIONS[option])
    batch = make_batch(LENS, QUERY_LENS, group=4)

    def spoiling() -> None:
        spoil(batch, 1, range(1250, 1251), bits)
        spoil(batch, 3, range(60, 94), bits)

    check(each_isa, lambda module: (choose(module, batch, softmax, renormalize),), spoiling)


@pytest.mark.parametrize("pooling", ["none", "avg", "max"])
@pytest.mark.parametrize("gqa_reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("option", ["plain", "soft cap", "sinks"])
@pytest.mark.parametrize("knows_lse", [False, True])
def test_window_scores(make_batch, each_isa, option, gqa_reduce, pooling, knows_lse) -> None:
    softmax = Softmax(SCALE, **OPTIONS[option])
    reduction = Reduction(gqa_reduce, pooling=pooling, kernel_size=5)
    # Keys that all queries of the window see; and only the last one, among many.
    places = {0: range(250, 251), 2: range(1299, 1300), 3: range(95)}
    lens, queries = [300, 700, 1300, 95], [90, 40, 40, 40]

    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch(lens, queries, group=4, dtype=dtype)

        def score(module: Any, batch: Any = batch) -> tuple[torch.Tensor]:
            lse = attend(module, batch.attention(), softmax)[1] if knows_lse else None
            return (module.window_scores(batch.windows(8), softmax, reduction, log_sum_exp=lse),)

        def spoiling(batch: Any = batch) -> None:
            for request, positions in places.items():
                spoil(batch, request, positions)

        check(each_isa, score, spoiling)


def test_a_query_head_with_nan_is_not_lost_in_the_maximum(make_batch, each_isa) -> None:
    """Spoil one query head of a KV head, each in turn: the largest of all heads is NaN."""
    for head in range(4):
        batch = make_batch([100], [20], group=4)
        batch.query[-1, head] = torch.nan
        for isa in each_isa():
            scores = cpu.window_scores(batch.windows(4), Softmax(SCALE), Reduction("max"))
            assert scores[0, 0].isnan().all(), (isa, head)
            assert not scores[0, 1].isnan().any(), (isa, head)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("knows_lse", [False, True])
def test_key_mass(make_batch, each_isa, option, knows_lse) -> None:
    softmax = Softmax(SCALE, **OPTIONS[option])

    def add(module: Any, batch: Any) -> torch.Tensor:
        log_sum_exp = attend(module, batch.attention(), softmax)[1] if knows_lse else None
        mass = torch.zeros(batch.key_cache.shape[:3])
        module.add_key_mass(mass, batch.attention(), softmax, log_sum_exp=log_sum_exp)
        return mass

    batch = make_batch(LENS, QUERY_LENS, group=4)
    whole = {isa: add(cpu, batch) for isa in each_isa()}
    for request, positions in {1: range(1290, 1291), 3: range(95), 4: range(55, 56)}.items():
        spoil(batch, request, positions)
    for isa in each_isa():
        mass = add(cpu, batch)
        last = [int(batch.block_table[r, (n - 1) // 16]) for r, n in enumerate(LENS)]
        for request, (n, block) in enumerate(zip(LENS, last, strict=True)):
            rows, spoiled = mass[block][:, : (n - 1) % 16 + 1], request in (1, 3, 4)
            assert rows[0].isnan().all() == spoiled and rows[0].isnan().any() == spoiled, isa
            assert torch.equal(rows[1], whole[isa][block][1, : (n - 1) % 16 + 1]), isa


@pytest.mark.parametrize("option", ["plain", "soft cap", "sinks"])
def test_recent_mass(make_batch, each_isa, option) -> None:
    softmax = Softmax(SCALE, **OPTIONS[option])

    batch = make_batch([300, 700, 95], [90, 20, 20], group=4)
    recents, contexts = torch.tensor([[8, 8, 8], [200, 600, 80]], dtype=torch.int32)
    recent = RecentBatch(
        *(batch.query, batch.key_cache, batch.block_table, batch.query_start_loc[1:]),
        *(batch.seq_lens, batch.skips, recents, contexts),
    )

    def spoiling() -> None:
        spoil(batch, 0, range(250, 251))
        spoil(batch, 2, range(95))

    check(each_isa, lambda ops: (ops.recent_mass(recent, softmax, distance_weight=2.0),), spoiling)


@pytest.mark.parametrize("module", [cpu, reference])
def test_selection_takes_nan_first(module) -> None:
    """Rank NaN of both signs before infinity, ties to the lower place; scores should have none."""
    scores = torch.arange(20.0).repeat(1, 1, 1)
    scores[0, 0, 3], scores[0, 0, 11], scores[0, 0, 7] = (
        _nan(NEGATIVE_NAN, torch.float32),
        _nan(NAN, torch.float32),
        torch.inf,
    )
    lens, keeps = (torch.tensor([n], dtype=torch.int32) for n in (20, 4))
    assert module.select(scores, lens, keeps, window=1).tolist() == [[[3, 7, 11, 19]]]
    keeps = torch.tensor([3], dtype=torch.int32)
    assert module.select(scores, lens, keeps, window=1).tolist() == [[[3, 11, 19]]]


@pytest.mark.parametrize("kind", list(SUMMARY_ROWS))
def test_summaries_of_pages(each_isa, kind) -> None:
    """Of a page whose sixth token has a NaN in one key, in one of its numbers."""
    keys = torch.randn(8, 2, 16, 64)
    keys[3, 0, 5, 7] = torch.nan
    (table, zeros), lens = pages_of(8), torch.tensor([8 * 16], dtype=torch.int32)

    def summaries(module: Any) -> torch.Tensor:
        pool = torch.zeros(8, 2, SUMMARY_ROWS[kind] * 64)
        module.summarise_pages(pool, keys, table, zeros, lens, zeros, kind=kind, max_pages=8)
        return pool

    wrong = summaries(page_reference).isnan()
    assert wrong.any() and not wrong[3, 1].any(), "the test spoils nothing"
    for isa in each_isa():
        assert torch.equal(summaries(page_cpu).isnan(), wrong), isa


@pytest.mark.parametrize("combine", ["mean", "max"])
def test_scores_of_pages(each_isa, combine) -> None:
    """All pages of the KV head have NaN, since a softmax divides by the sum over them."""
    keys = torch.randn(8, 2, 16, 64)
    keys[3, 0, 5, 7] = torch.nan
    (table, zeros), last = pages_of(8), torch.tensor([8 * 16 - 1], dtype=torch.int32)
    rows = PageBatch(torch.randn(1, 4, 64), table, zeros, last, zeros, 16, max_pages=8)

    def scores(module: Any) -> torch.Tensor:
        found: torch.Tensor = module.score_pages(
            rows, Softmax(SCALE), keys, kind="rows", combine=combine
        )
        return found

    wrong = scores(page_reference).isnan()
    assert wrong[0, 0, :7].all() and not wrong[0, 1].any()
    for isa in each_isa():
        assert torch.equal(scores(page_cpu).isnan(), wrong), isa


def pages_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of one request that holds the pages in order; and where its tokens begin."""
    return torch.arange(count, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
