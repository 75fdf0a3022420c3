# SPDX-License-Identifier: Apache-2.0
"""Page selection in Triton against the reference, and attention to lists of pages."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import head_sinks
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton import functions as triton_ops
from vllm_pyramid.methods.pages.kernels import reference as page_reference
from vllm_pyramid.methods.pages.kernels import triton as page_triton
from vllm_pyramid.methods.pages.kernels.records import (
    SCORE_KINDS,
    SUMMARY_KINDS,
    SUMMARY_ROWS,
    PageBatch,
    PageSelection,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.cpu if INTERPRETED else pytest.mark.gpu

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
    paged = make_paged(LENS, kv_heads, head_size, dtype, joint=joint)
    for r, skip in enumerate(SKIPS):
        paged.hide(r, skip // 16)
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


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_scores(make_paged, ints, geometry, kind):
    paged, rows = made(make_paged, ints, geometry)
    _, group, head_size, dtype, joint = geometry
    softmax, options = Softmax(head_size**-0.5), {"kind": kind}
    if joint:
        sinks = head_sinks(rows.query.shape[1]).to(rows.query.device) - 7
        softmax = Softmax(head_size**-0.5, soft_cap=5.0, sinks=sinks)
        options["combine"] = "max"
    pool = paged.key_cache
    if kind in SUMMARY_KINDS:
        wanted = dtype if group != 1 else torch.float32
        starts = ints([0] * 4)
        pool = summaries(page_reference, paged, ints, kind, wanted)
        inputs = (paged.block_table, starts, ints(LENS), ints(SKIPS))
        page_reference.summarise_pages(pool, paged.key_cache, *inputs, kind=kind)
    elif kind == "rows":
        pool = torch.randn(*pool.shape[:2], 3, head_size, device=pool.device).to(dtype)
    right = page_reference.score_pages(rows, softmax, pool, **options, compute_dtype=torch.float64)
    found = page_triton.score_pages(rows, softmax, pool, **options)
    assert found.shape == right.shape and not right.isnan().any()
    close(found.exp(), right.exp(), 1e-4, 0.0)  # -inf behind the last candidate
    close(found.nan_to_num(neginf=0), right.nan_to_num(neginf=0), 5e-4, 1e-6)
    assert torch.equal(found == -torch.inf, right == -torch.inf)
    out = torch.zeros(9, *right.shape[1:2], right.shape[2] + 5, device=right.device)
    held = page_triton.score_pages(
        replace(rows, max_pages=right.shape[2] + 1), softmax, pool, **options, out=out
    )
    assert held.data_ptr() == out.data_ptr()
    assert torch.equal(held[:, :, : right.shape[2]], found)
    assert (held[:, :, right.shape[2] :] == -torch.inf).all()


@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (2, 3), (1, 30)])
@pytest.mark.parametrize("levels", [3, 1000])
def test_selection(make_paged, ints, sinks, recent, levels):
    """Compare every number with the reference, with ties and budgets beyond all pages."""
    _, rows = made(make_paged, ints, (2, 1, 64, torch.bfloat16, False))
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (5, 2, 18), generator=generator).float() - 2
    scores = scores.to(rows.query.device)
    for budgets in ([1, 3, 4, 2, 7], [50, 50, 6, 1, 18]):
        options = {"sinks": sinks, "recent": recent}
        right = page_reference.select_pages(rows, scores, ints(budgets), **options)
        found = page_triton.select_pages(rows, scores, ints(budgets), **options)
        held = PageSelection.empty(7, 2, right.pages.shape[2] + 3, scores.device)
        wide = page_triton.select_pages(rows, scores, ints(budgets), **options, out=held)
        width = right.pages.shape[2]
        for name in ("pages", "block_table", "counts", "seq_lens", "skips"):
            assert torch.equal(getattr(found, name), getattr(right, name)), name
            part = getattr(wide, name)
            assert torch.equal(
                part if part.dim() == 1 else part[:, :, :width], getattr(right, name)
            )
        assert (wide.pages[:, :, width:] == -1).all() and not wide.block_table[:, :, width:].any()


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
    everything = page_triton.select_pages(rows, scores, ints([99] * 5))
    table = paged.block_table[rows.requests.long()]
    whole = AttentionBatch(*caches, table, starts, rows.positions + 1, rows.skips)
    triton_ops.paged_attention(dense, whole, softmax, num_splits=splits)
    lists = (everything.block_table, starts, everything.seq_lens, everything.skips)
    triton_ops.paged_attention(out, AttentionBatch(*caches, *lists), softmax, num_splits=splits)
    tolerance = 2e-5 if dtype == torch.float32 else 2.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, dense, rtol=tolerance, atol=tolerance)
    seen = rows.skips < 16  # their tiles begin where those of the table do
    assert torch.equal(out[seen], dense[seen]) and seen.any()
    found = page_triton.select_pages(rows, scores, ints([4] * 5), recent=2)
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
