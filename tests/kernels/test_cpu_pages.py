# SPDX-License-Identifier: Apache-2.0
"""Page selection in C++: every instruction set against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.arguments import head_sinks
from tests.kernels.pages import Pages, build_pages, int32
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Softmax
from vllm_pyramid.methods.pages.kernels import cpu as page_cpu
from vllm_pyramid.methods.pages.kernels import reference as page_reference
from vllm_pyramid.methods.pages.kernels.records import (
    SCORE_KINDS,
    SUMMARY_KINDS,
    PageBatch,
    PageSelection,
)

# Drafts, a hidden part of a page, a request that sees one page, a window of AMX's tiles, splits.
LENS = [1, 300, 64, 700, 1500, 20]
QUERY_LENS = [1, 5, 1, 2, 1, 1]
SKIPS = [0, 37, 0, 128, 0, 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *FP8_DTYPES]


def made(
    dtype: torch.dtype = torch.float32, of: Any = (LENS, QUERY_LENS, SKIPS), **options: Any
) -> Pages:
    """Make pages; a cache of 8-bit floats gets a query of bfloat16."""
    kind = torch.bfloat16 if dtype in FP8_DTYPES else dtype
    pages = build_pages(*of[:2], skips=of[2], dtype=kind, **options)
    if dtype in FP8_DTYPES:
        batch = pages.batch
        batch.key_cache, batch.value_cache = (
            cache.float().to(dtype) for cache in (batch.key_cache, batch.value_cache)
        )
    return pages


def summaries(module: Any, pages: Pages, kind: str, dtype: torch.dtype) -> torch.Tensor:
    pool = pages.pool(kind, dtype)
    pages.summarise(module, pool, kind)
    return pool


@pytest.mark.parametrize("kind", SUMMARY_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [40, 128, 256])
def test_summaries(each_isa, kind: str, dtype: torch.dtype, head_size: int) -> None:
    """Round the same numbers once to float32 and to 16 bits; a box is exact in both."""
    pages = made(dtype, head_size=head_size, layout="rows")
    for held in (torch.float32, torch.bfloat16):
        right = pages.pool(kind)
        pages.summarise(page_reference, right, kind, compute_dtype=torch.float64)
        for isa in each_isa():
            found = summaries(page_cpu, pages, kind, held)
            exact = kind == "box" and (dtype is not torch.float16 or held is torch.float32)
            exact = exact and not (dtype is torch.float32 and held is torch.bfloat16)
            low = held is torch.bfloat16
            torch.testing.assert_close(
                found.float(), right, equal_nan=True,
                rtol=0 if exact else 2**-8 if low else 1e-5, atol=0 if exact else 1e-6,
                msg=lambda text, isa=isa: f"{isa}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (4, 40), (7, 128), (40, 64)])
def test_scores(each_isa, kind: str, dtype: torch.dtype, group: int, head_size: int) -> None:
    pages = made(dtype, group=group, head_size=head_size, seed=group)
    rows = replace(pages.rows(), key_scale=0.5)
    softmax = Softmax(head_size**-0.5)
    if kind == "rows":
        generator = torch.Generator().manual_seed(5)
        shape = len(pages.batch.key_cache), 2, 3, head_size
        pool = torch.randn(shape, generator=generator).to(dtype)
    else:
        held = torch.bfloat16 if group == 7 else torch.float32
        pool = summaries(page_reference, pages, kind, held)
    options: dict[str, Any] = {"kind": kind}
    if group == 4:
        sinks = head_sinks(8) - 8
        softmax = Softmax(head_size**-0.5, soft_cap=5.0, sinks=sinks)
        options["combine"] = "max"
    right = page_reference.score_pages(rows, softmax, pool, **options, compute_dtype=torch.float64)
    for isa in each_isa():
        found = page_cpu.score_pages(rows, softmax, pool, **options)
        torch.testing.assert_close(
            found, right, rtol=2e-3, atol=1e-6, msg=lambda text, isa=isa: f"{isa}: {text}"
        )


def test_rows_score_the_same_alone_and_on_two_threads(each_isa, two_threads: None) -> None:
    pages = made(torch.bfloat16, group=4)
    pool = summaries(page_cpu, pages, "spread", torch.bfloat16)
    rows, softmax = pages.rows(), Softmax(0.125)
    for isa in each_isa():
        together = page_cpu.score_pages(rows, softmax, pool, kind="spread")
        for s in range(len(together)):
            one = replace(rows, **{
                name: getattr(rows, name)[s : s + 1]
                for name in ("query", "requests", "positions", "skips")
            })  # fmt: skip
            alone = page_cpu.score_pages(one, softmax, pool, kind="spread")
            assert torch.equal(alone[0], together[s, :, : alone.shape[2]]), (isa, s)


@settings(max_examples=60)
@given(data=st.data())
def test_no_product_exceeds_its_box(data: st.DataObject) -> None:
    """Bound every key's product from above, on the instruction set in use and in the reference."""
    seed = data.draw(st.integers(0, 2**20))
    length = data.draw(st.integers(18, 200))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scale = data.draw(st.sampled_from([1e-3, 1.0, 30.0]))
    pages = build_pages([length], [1], dtype=dtype, seed=seed, kv_heads=1, group=1)
    pages.batch.query.mul_(scale)
    bound = summaries(page_cpu, pages, "box", dtype)
    right = summaries(page_reference, pages, "box", dtype)
    assert torch.equal(bound.nan_to_num(7), right.nan_to_num(7))
    q = pages.batch.query[0, 0].double()
    most = bound[pages.batch.block_table[0, : length // 16].long(), 0].double()
    products = (torch.cat([q.clamp(min=0), q.clamp(max=0)]) * most).sum(-1)
    for page, product in enumerate(products.tolist()):
        keys = reference.gather_tokens(
            pages.batch.key_cache, pages.batch.block_table[0], page * 16, page * 16 + 16
        )
        largest = float((keys[:, 0].double() @ q).max())
        assert largest <= product + 1e-9 * abs(product)


@settings(max_examples=150)
@given(data=st.data())
def test_selection_is_the_references(data: st.DataObject) -> None:
    """Draw lengths, skips, budgets and scores with many ties."""
    size = data.draw(st.sampled_from([1, 8, 16]))
    count = data.draw(st.integers(1, 4))
    positions = [data.draw(st.integers(0, 60 * size)) for _ in range(count)]
    skips = [data.draw(st.integers(0, p)) for p in positions]
    table = torch.randperm(4 * 61, generator=torch.Generator().manual_seed(count)).view(4, 61)
    requests = [data.draw(st.integers(0, 3)) for _ in range(count)]
    query = torch.zeros(count, 4, 8)
    rows = build_rows(query, table.int(), requests, positions, skips, size)
    levels = data.draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    scores = torch.randint(0, levels, (count, 2, 61), generator=generator).float() - 3
    budgets = int32(*(data.draw(st.integers(1, 70)) for _ in range(count)))
    options = {"sinks": data.draw(st.integers(0, 5)), "recent": data.draw(st.integers(1, 5))}
    found = page_cpu.select_pages(rows, scores, budgets, **options)
    right = page_reference.select_pages(rows, scores, budgets, **options)
    for name in ("pages", "block_table", "counts", "seq_lens", "skips"):
        assert torch.equal(getattr(found, name), getattr(right, name)), name


def build_rows(
    query: torch.Tensor,
    table: torch.Tensor,
    requests: list[int],
    positions: list[int],
    skips: list[int],
    size: int,
) -> PageBatch:
    return PageBatch(query, table, int32(*requests), int32(*positions), int32(*skips), size)


def attend(module: Any, batch: AttentionBatch, softmax: Softmax, **options: Any) -> torch.Tensor:
    out = torch.full(batch.query.shape, float("nan"), dtype=torch.float32)
    module.paged_attention(out, batch, softmax, **options)
    return out


def chosen(module: Any, pages: Pages, budget: int) -> PageSelection:
    pool = summaries(module, pages, "spread", torch.float32)
    rows = pages.rows()
    scores = module.score_pages(rows, Softmax(0.125), pool, kind="spread")
    budgets = torch.full_like(pages.positions, budget)
    return module.select_pages(rows, scores, budgets, sinks=1, recent=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (4, 128), (7, 40), (8, 64), (12, 32)])
@pytest.mark.parametrize("block_size", [16, 24])
def test_all_pages_are_dense_attention(each_isa, dtype, group, head_size, block_size) -> None:
    """Give a budget beyond every length: the lists are the tables, and so are the bits."""
    pages = made(dtype, group=group, head_size=head_size, block_size=block_size)
    softmax = Softmax(head_size**-0.5, soft_cap=9.0 if group == 7 else 0.0)
    found = chosen(page_cpu, pages, 10**6)
    for isa in each_isa():
        dense = attend(cpu, pages.attention(None), softmax)
        assert not dense.isnan().any()
        assert torch.equal(attend(cpu, pages.attention(found), softmax), dense), isa


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (4, 128), (7, 40), (8, 64)])
def test_every_path_reads_the_pages_of_its_head(each_isa, dtype, group, head_size) -> None:
    """Move each KV head to blocks of its own: prompts, drafts and decode steps keep their bits."""
    of = [1, 37, 300, 700, 20, 1500], [1, 5, 90, 1, 0, 3], [0, 0, 41, 0, 0, 700]
    batch = made(dtype, of, group=group, head_size=head_size).batch
    attention = batch.attention()
    blocks, heads = batch.key_cache.shape[:2]
    apart = []
    order = torch.randperm(blocks * heads, generator=torch.Generator().manual_seed(3))
    order = order.view(blocks, heads)
    for cache in (batch.key_cache, batch.value_cache):
        shape = (blocks * heads, *cache.shape[1:])
        moved = torch.full(shape, float("nan"), dtype=torch.float32).to(dtype)
        for g in range(heads):
            moved[order[:, g], g] = cache[:, g]
        apart.append(moved)
    real = (batch.block_table >= 0) & (batch.block_table < blocks)
    lists = torch.stack(
        [
            torch.where(real, order[batch.block_table.clamp(0, blocks - 1).long(), g].int(),
                        batch.block_table)
            for g in range(heads)
        ],
        dim=1,
    )  # fmt: skip
    moved = replace(attention, key_cache=apart[0], value_cache=apart[1], block_table=lists)
    softmax = Softmax(head_size**-0.5, sinks=head_sinks(heads * group))
    dense_lse, lse = (torch.zeros(batch.query.shape[:2]) for _ in range(2))
    for isa in each_isa():
        dense = attend(cpu, attention, softmax, log_sum_exp=dense_lse)
        assert torch.equal(attend(cpu, moved, softmax, log_sum_exp=lse), dense), isa
        assert torch.equal(lse, dense_lse), isa


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(2, 64), (6, 128)])
def test_only_the_chosen_pages_are_read(each_isa, dtype, group, head_size) -> None:
    """Overwrite all others with NaN, for each KV head: the same bits, close to the reference."""
    of = [300, 700, 90, 1500], [1] * 4, [37, 0, 0, 640]
    pages = made(dtype, of, group=group, head_size=head_size)
    batch = pages.batch
    found = chosen(page_reference, pages, 6)
    assert found.counts.tolist() == [6] * 4
    softmax = Softmax(head_size**-0.5)
    attention = pages.attention(found)
    right = torch.empty(batch.query.shape, dtype=torch.float64)
    reference.paged_attention(right, attention, softmax, compute_dtype=torch.float64)
    before = {isa: attend(cpu, attention, softmax) for isa in each_isa()}
    for cache in (batch.key_cache, batch.value_cache):
        kept = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for g in range(cache.shape[1]):
            kept[found.block_table[:, g].long(), g] = True
        if dtype in FP8_DTYPES:
            cache.view(torch.uint8)[~kept] = 0x7F
        else:
            cache[~kept] = float("nan")
        assert cache.float()[~kept].isnan().all()
    low = dtype is not torch.float32
    for isa in each_isa():
        after = attend(cpu, attention, softmax)
        assert torch.equal(after, before[isa]), isa
        torch.testing.assert_close(
            after.double(), right, rtol=2e-2 if low else 1e-4, atol=2e-2 if low else 1e-5,
            msg=lambda text, isa=isa: f"{isa}: {text}",
        )  # fmt: skip


def test_values_that_do_not_fit_are_errors() -> None:
    pages = build_pages([100], [1])
    rows, batch = pages.rows(), pages.batch
    pool = summaries(page_cpu, pages, "box", torch.float32)
    with pytest.raises(ValueError, match="requests of row 0 is 1, but block_table has 1 rows"):
        page_cpu.score_pages(replace(rows, requests=int32(1)), Softmax(0.1), pool, kind="box")
    far = replace(rows, positions=int32(8 * 16), max_pages=9)
    with pytest.raises(ValueError, match="its row of block_table holds 128"):
        page_cpu.score_pages(far, Softmax(0.1), pool, kind="box")
    with pytest.raises(ValueError, match="block_table names block"):
        page_cpu.score_pages(rows, Softmax(0.1), pool[:0], kind="box")
    with pytest.raises(ValueError, match="row 0 has 6 candidates, more than the 3 columns"):
        page_cpu.score_pages(replace(rows, max_pages=4), Softmax(0.1), pool, kind="box")
    with pytest.raises(ValueError, match="scores has 5 columns"):
        page_cpu.select_pages(rows, torch.zeros(1, 2, 5), int32(3))
    wide = build_pages([100], [1], head_size=264)
    with pytest.raises(ValueError, match="up to 512 numbers"):
        page_cpu.score_pages(wide.rows(), Softmax(0.1), wide.pool("box"), kind="box")
    lists = batch.block_table[:, None].expand(-1, 2, -1)
    out = torch.empty_like(batch.query)
    attention = replace(batch.attention(), block_table=lists)
    with pytest.raises(ValueError, match="a list in memory for each"):
        cpu.paged_attention(out, attention, Softmax(0.1))
    bad = lists.contiguous()
    bad[0, 1, 3] = 10**6
    with pytest.raises(ValueError, match="block_table names block 1000000"):
        cpu.paged_attention(out, replace(batch.attention(), block_table=bad), Softmax(0.1))
