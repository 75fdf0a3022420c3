# SPDX-License-Identifier: Apache-2.0
"""Page selection in Triton against the reference, and attention to lists of pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import INTERPRETED, head_sinks
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton import functions as triton_ops
from vllm_pyramid.methods.pages.kernels import reference as page_reference
from vllm_pyramid.methods.pages.kernels import triton as page_triton
from vllm_pyramid.methods.pages.kernels.records import (
    COMBINES,
    SCORE_KINDS,
    SUMMARY_KINDS,
    SUMMARY_ROWS,
    PageBatch,
    PageLists,
)

LENS, SKIPS = [1, 150, 64, 300], [0, 37, 0, 128]
# Drafts of the second request and single tokens of the others.
REQUESTS = [0, 1, 1, 2, 3]
POSITIONS = [0, 147, 149, 63, 299]
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16, False),
    (1, 4, 128, torch.bfloat16, True),
    (1, 20, 80, torch.float32, False),
    (2, 8, 32, torch.float16, True),
]


def close(found: torch.Tensor, right: torch.Tensor, tolerance: float, least: float) -> None:
    torch.testing.assert_close(
        found.double(), right.double(), rtol=tolerance, atol=least, equal_nan=True
    )


def made(make_paged: Any, ints: Any, geometry: Any) -> tuple[Any, PageBatch]:
    kv_heads, group, head_size, dtype, joint = geometry
    paged = make_paged(LENS, kv_heads, head_size, dtype, joint=joint, skips=SKIPS)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(len(REQUESTS), kv_heads * group, head_size, generator=generator)
    query = query.to(dtype).to(paged.key_cache.device)
    skips = ints([SKIPS[r] for r in REQUESTS])
    numbers = (ints(REQUESTS), ints(POSITIONS), skips)
    return paged, PageBatch(query, paged.block_table, *numbers, 16)


def summaries(
    module: Any, paged: Any, ints: Any, kind: str, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    blocks, heads, _, head_size = paged.key_cache.shape
    shape = (blocks, heads, SUMMARY_ROWS[kind] * head_size)
    pool = torch.full(shape, float("nan"), device=paged.key_cache.device).to(dtype)
    inputs = (paged.block_table, ints([0, 0, 32, 0]), ints(LENS), ints(SKIPS))
    module.summarise_pages(pool, paged.key_cache, *inputs, kind=kind, **options)
    return pool


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", SUMMARY_KINDS)
def test_summaries(make_paged, ints, geometry, kind):
    """Compare the whole pool: pages that hold no new key stay NaN."""
    paged, _ = made(make_paged, ints, geometry)
    right = summaries(page_reference, paged, ints, kind, torch.float32)
    assert right.isnan().any() and not right.isnan().all()
    close(summaries(page_triton, paged, ints, kind, torch.float32), right, 1e-5, 1e-6)
    known = summaries(page_triton, paged, ints, kind, torch.bfloat16, max_pages=19)
    # The interpreter cuts a float32 to its upper half where a GPU rounds it.
    close(known, right, 2.0**-7 if INTERPRETED else 2.0**-8, 1e-5)


@pytest.mark.parametrize("kind", SUMMARY_KINDS)
def test_nan_reaches_the_summary_of_its_page(make_paged, ints, kind):
    """A maximum of NaN and a number is the number: pages with NaN would be ranked by it."""
    paged, _ = made(make_paged, ints, GEOMETRIES[0])
    block = paged.block_table[1, 3].long()
    paged.key_cache[block, 0, 5, 7] = float("nan")
    right, found = (
        summaries(module, paged, ints, kind, torch.float32)[block].isnan()
        for module in (page_reference, page_triton)
    )
    assert right.sum() == 2 and torch.equal(found, right)


def pool_of(paged: Any, ints: Any, geometry: Any, kind: str) -> torch.Tensor:
    """Return summaries of all pages, in float32 where a KV head has one query head."""
    _, group, head_size, dtype, _ = geometry
    keys = paged.key_cache
    if kind == "rows":
        return torch.randn(*keys.shape[:2], 3, head_size, device=keys.device).to(dtype)
    pool = summaries(page_reference, paged, ints, kind, dtype if group != 1 else torch.float32)
    inputs = (paged.block_table, ints([0] * 4), ints(LENS), ints(SKIPS))
    page_reference.summarise_pages(pool, keys, *inputs, kind=kind)
    return pool


NAMES = (3, 7)


def chosen(
    module: Any,
    rows: PageBatch,
    softmax: Softmax,
    pool: torch.Tensor,
    budgets: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, PageLists]:
    """Choose into memory whose every number is known: 777 for scores, -5 for names."""
    (count, heads, _), device = rows.query.shape, rows.query.device
    scores = torch.full((count + 2, heads, 31), 777.0, device=device)
    lists = PageLists.zeros(count, pool.shape[1], 25, device)
    lists.block_table.fill_(-5)
    rows = replace(rows, max_pages=19)
    inputs = (rows, softmax, pool, budgets, scores, lists)
    module.choose_pages(*inputs, names=NAMES, **options)
    return scores, lists


def check_lists(
    rows: PageBatch,
    budgets: torch.Tensor,
    scores: torch.Tensor,
    lists: PageLists,
    *,
    sinks: int = 0,
    recent: int = 1,
) -> None:
    """Compare lists with the reference's for these scores; nothing else is written."""
    heads, group = lists.head_lens.shape[1], scores.shape[1] // lists.head_lens.shape[1]
    own = scores[: len(budgets), ::group, :18]
    right = page_reference.select_pages(rows, own, budgets, sinks=sinks, recent=recent)
    for s, count in enumerate(right.counts.tolist()):
        names = right.block_table[s, :, :count] * NAMES[0]
        names += torch.arange(heads, dtype=torch.int32, device=names.device)[:, None] * NAMES[1]
        assert torch.equal(lists.block_table[s, :, :count], names)
        assert (lists.block_table[s, :, count:] == -5).all()
        visible = int(rows.positions[s]) // 16 - int(rows.skips[s]) // 16 + 1
        assert (scores[s, :, visible - 1 :] == 777).all(), "a page that the row does not see"
        assert budgets[s] < visible or (scores[s] == 777).all(), "a row that reads everything"
    assert (scores[len(budgets) :] == 777).all()
    assert torch.equal(lists.seq_lens, right.seq_lens) and torch.equal(lists.skips, right.skips)
    assert torch.equal(lists.head_lens, right.seq_lens[:, None].expand(-1, heads))
    assert torch.equal(lists.miscounted, right.counts != budgets)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_choice(make_paged, ints, geometry, kind):
    """Scores as the reference's in float64, and the lists of these scores; also in parts."""
    paged, rows = made(make_paged, ints, geometry)
    _, group, head_size, _, joint = geometry
    softmax, options = Softmax(head_size**-0.5), {"kind": kind}
    if joint:
        sinks = head_sinks(rows.query.shape[1]).to(rows.query.device) - 7
        softmax = Softmax(head_size**-0.5, soft_cap=5.0, sinks=sinks)
        options["combine"] = "max"
    pool = pool_of(paged, ints, geometry, kind)
    right = page_reference.score_pages(rows, softmax, pool, **options, compute_dtype=torch.float64)
    budgets = ints([1, 3, 4, 2, 7])
    scores, lists = chosen(page_triton, rows, softmax, pool, budgets, **options)
    assert not lists.unranked.any()
    check_lists(rows, budgets, scores, lists)
    for s in range(1, 5):  # the first has one page
        candidates = int(right[s, 0].isfinite().sum())
        found = scores[s, ::group, :candidates]
        close(found, right[s, :, :candidates], 5e-4, 1e-6)
    numbers = (rows.query, rows.requests, rows.positions, rows.skips)
    query, *ranges = (one[1:4] for one in numbers)
    part = PageBatch(query, rows.block_table, *ranges, 16)
    again, of_part = chosen(page_triton, part, softmax, pool, budgets[1:4], **options)
    assert torch.equal(again[:3], scores[1:4])
    assert torch.equal(of_part.block_table, lists.block_table[1:4])


@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (2, 3), (1, 30)])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_lists(make_paged, ints, sinks, recent, levels):
    """With pages of few different summaries, whose scores are equal; budgets beyond all pages."""
    geometry = (2, 2, 64, torch.bfloat16, False)
    paged, rows = made(make_paged, ints, geometry)
    pool = pool_of(paged, ints, geometry, "spread")
    entries = torch.randint(-2, 3, (levels, *pool.shape[1:]), device=pool.device).to(pool.dtype)
    rows = replace(rows, query=rows.query.sign())  # products are exact, whatever the order
    kinds = torch.randint(0, levels, (len(pool),), generator=torch.Generator().manual_seed(levels))
    pool.copy_(entries[kinds.to(pool.device)])
    options = {"sinks": sinks, "recent": recent}
    for budgets in ([1, 3, 4, 2, 7], [50, 50, 6, 1, 18]):
        inputs = (rows, Softmax(0.125), pool, ints(budgets))
        scores, lists = chosen(page_triton, *inputs, kind="spread", **options)
        check_lists(rows, ints(budgets), scores, lists, **options)
        for g in range(2):  # pages with one summary have one score, so lists have ties
            few = levels if levels < 9 and max(budgets) < 9 and recent < 30 else 10
            assert len(scores[4, 2 * g, :10].unique()) <= few
        by_reference = chosen(page_reference, *inputs, kind="spread", **options)
        check_lists(rows, ints(budgets), *by_reference, **options)


@pytest.mark.parametrize("combine", COMBINES)
def test_rows_with_nan_are_flagged(make_paged, ints, combine):
    """One KV head of a row has NaN, and chooses as if its scores were 0; others do not change."""
    geometry = (2, 2, 64, torch.float32, False)
    paged, rows = made(make_paged, ints, geometry)
    pool, budgets = pool_of(paged, ints, geometry, "box"), ints([1, 3, 4, 2, 7])
    options = {"kind": "box", "combine": combine}
    before, lists = chosen(page_triton, rows, Softmax(0.125), pool, budgets, **options)
    pool[rows.block_table[3, 12], 1] = float("nan")
    pool[rows.block_table[2, 1], 0, 5] = float("inf")
    for module in (page_triton, page_reference):
        scores, found = chosen(module, rows, Softmax(0.125), pool, budgets, **options)
        assert found.unranked.tolist() == [False, False, False, True, True]
        check_lists(rows, budgets, scores, found)
        assert not scores[4, 2, :10].any() and not scores[3, 0, :3].any()
        assert torch.equal(found.block_table[:3], lists.block_table[:3])
        assert torch.equal(found.block_table[4, 0], lists.block_table[4, 0])
    everything, found = chosen(page_triton, rows, Softmax(0.125), pool, ints([50] * 5), **options)
    assert not found.unranked.any() and (everything == 777).all() and not before.isnan().any()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", SUMMARY_KINDS)
def test_pages_that_rows_fill_are_summarised(make_paged, ints, geometry, kind):
    """The rows' own pages, where their tokens are the last of them; no other entry changes."""
    paged, rows = made(make_paged, ints, geometry)
    positions = ints([0, 143, 149, 63, 287])
    rows = replace(rows, positions=positions)
    softmax, budgets = Softmax(geometry[2] ** -0.5), ints([1, 3, 4, 2, 7])
    pool = pool_of(paged, ints, geometry, kind)
    blocks = [rows.block_table[r, p] for r, p in ((1, 8), (2, 3), (3, 17))]
    for block in blocks:
        pool[block] = 0.0
    before, by_reference = pool.clone(), pool.clone()
    keys = {"kind": kind, "key_cache": paged.key_cache}
    scores, lists = chosen(page_triton, rows, softmax, pool, budgets, **keys)
    chosen(page_reference, rows, softmax, by_reference, budgets, **keys)
    close(pool, by_reference, 2.0**-7 if pool.dtype != torch.float32 else 1e-5, 1e-5)
    check_lists(rows, budgets, scores, lists)
    for block in blocks:
        assert pool[block].any()
        before[block] = pool[block]
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


def test_programs_fill_a_device_and_share_long_rows():
    device = torch.device("cpu")  # which four programs fill
    assert page_triton.num_parts(1, 256, device) == 8
    assert [page_triton.num_parts(1, tiles, device) for tiles in (1, 2, 64)] == [1, 2, 8]
    assert [page_triton.num_parts(4, tiles, device) for tiles in (1, 64, 300)] == [1, 2, 10]
    assert [page_triton.num_parts(2048, tiles, device) for tiles in (1, 32, 33)] == [1, 1, 2]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_reads_the_lists_of_each_head(make_paged, ints, geometry, splits):
    """Poison every page that a KV head did not choose; all pages give the dense bits."""
    paged, rows = made(make_paged, ints, geometry)
    kv_heads, _, head_size, dtype, _ = geometry
    generator = torch.Generator().manual_seed(8)
    scores = torch.rand(5, kv_heads, 18, generator=generator).to(rows.query.device)
    starts, softmax = ints(list(range(6))), Softmax(head_size**-0.5)
    caches = (rows.query, paged.key_cache, paged.value_cache)
    out, dense = torch.empty_like(rows.query), torch.empty_like(rows.query)
    everything = page_reference.select_pages(rows, scores, ints([99] * 5))
    table = paged.block_table[rows.requests.long()]
    whole = AttentionBatch(*caches, table, starts, rows.positions + 1, rows.skips)
    triton_ops.paged_attention(dense, whole, softmax, num_splits=splits)
    lists = (everything.block_table, starts, everything.seq_lens, everything.skips)
    triton_ops.paged_attention(out, AttentionBatch(*caches, *lists), softmax, num_splits=splits)
    tolerance = 2e-5 if dtype == torch.float32 else 2.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, dense, rtol=tolerance, atol=tolerance)
    seen = rows.skips < 16  # their tiles begin where those of the table do
    assert torch.equal(out[seen], dense[seen]) and seen.any()
    found = page_reference.select_pages(rows, scores, ints([4] * 5), recent=2)
    lists = (found.block_table, starts, found.seq_lens, found.skips)
    batch = AttentionBatch(*caches, *lists)
    right = torch.empty(rows.query.shape, dtype=torch.float64, device=out.device)
    reference.paged_attention(right, batch, softmax, compute_dtype=torch.float64)
    kept = torch.zeros(paged.key_cache.shape[:2], dtype=torch.bool, device=out.device)
    for s, count in enumerate(found.counts.tolist()):
        for g in range(kv_heads):
            kept[found.block_table[s, g, :count].long(), g] = True
    for cache in caches[1:]:
        cache[~kept] = float("nan")
    triton_ops.paged_attention(out, batch, softmax, num_splits=splits)
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    # A prompt's kernel reads the lists too.
    twice = torch.cat([rows.query[4:], rows.query[4:]])
    batch = AttentionBatch(
        twice, *caches[1:], found.block_table[4:], ints([0, 2]), found.seq_lens[4:], found.skips[4:]
    )
    right, out = right.new_empty(twice.shape), torch.empty_like(twice)
    reference.paged_attention(right, batch, softmax, compute_dtype=torch.float64)
    triton_ops.paged_attention(out, batch, softmax, num_splits=splits)
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
