# SPDX-License-Identifier: Apache-2.0
"""Page selection: the reference against plain arithmetic, C++ against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.every_kernel import cpu, reference
from tests.kernels.pages import Pages, build_pages, int32
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.pages.kernels import cpu as page_cpu
from vllm_pyramid.methods.pages.kernels import reference as page_reference
from vllm_pyramid.methods.pages.kernels.records import SCORE_KINDS, SUMMARY_KINDS, PageSelection

# One token; within a page; drafts; a full last page; many pages.
LENS = [1, 9, 300, 64, 700]
QUERY_LENS = [1, 1, 5, 1, 2]
SKIPS = [0, 0, 37, 0, 128]
MODULES = [page_reference, page_cpu]
EACH_MODULE = pytest.mark.parametrize("module", MODULES, ids=["reference", "cpu"])


def keys_of(pages: Pages, row: int, page: int) -> torch.Tensor:
    """Return the keys of a page that a row's request holds, in float64, as `[n, G, D]`."""
    batch, r = pages.batch, int(pages.requests[row])
    size, skip, length = pages.block_size, int(batch.skips[r]), int(batch.seq_lens[r])
    begin, end = max(page * size, skip), min((page + 1) * size, length)
    return reference.gather_tokens(batch.key_cache, batch.block_table[r], begin, end).double()


def scored(module: Any, pages: Pages, kind: str, **options: Any) -> torch.Tensor:
    """Compute the summaries and the scores."""
    softmax = Softmax(
        pages.batch.query.shape[2] ** -0.5,
        soft_cap=options.pop("soft_cap", 0.0),
        sinks=options.pop("sinks", None),
    )
    pool = options.pop("pool", None)
    if pool is None:
        pool = pages.pool(kind, options.pop("pool_dtype", torch.float32))
        pages.summarise(module, pool, kind)
    return module.score_pages(pages.rows(), softmax, pool, kind=kind, **options)


@EACH_MODULE
@pytest.mark.parametrize("kind", SUMMARY_KINDS)
def test_summaries_are_those_of_the_keys_in_the_cache(module: Any, kind: str) -> None:
    """Compare with float64; the rest of the pool is not written."""
    pages = build_pages(LENS, QUERY_LENS, skips=SKIPS)
    pool = pages.pool(kind)
    pages.summarise(module, pool, kind)
    written = set()
    for row, r in enumerate(pages.requests.tolist()):
        first, last = SKIPS[r] // 16, (LENS[r] - 1) // 16
        for page in range(first, last + 1):
            block = int(pages.batch.block_table[r, page])
            written.add(block)
            keys = keys_of(pages, row, page)
            parts = {
                "box": [keys.max(0).values, keys.min(0).values],
                "spread": [keys.mean(0), (keys - keys.mean(0)).square().mean(0).sqrt()],
            }[kind]
            right = torch.cat(parts, dim=-1)
            torch.testing.assert_close(pool[block].double(), right, rtol=1e-5, atol=1e-6)
    rest = [block for block in range(len(pool)) if block not in written]
    assert rest and pool[rest].isnan().all()


@EACH_MODULE
def test_only_pages_with_new_keys_are_computed_again(module: Any) -> None:
    pages = build_pages([100, 50], [1, 1], skips=[20, 0])
    pool = torch.full_like(pages.pool("box"), 7.0)
    batch = pages.batch
    lens, skips = batch.seq_lens, batch.skips
    table = batch.block_table
    module.summarise_pages(
        pool, batch.key_cache, table, int32(70, 50), lens, skips, kind="box", max_pages=7
    )
    changed = {b for b in range(len(pool)) if not torch.equal(pool[b], torch.full_like(pool[b], 7))}
    assert changed == {int(table[0, page]) for page in (4, 5, 6)}


@EACH_MODULE
def test_summaries_forget_rejected_tokens(module: Any) -> None:
    """Write drafts over the end of a page, then the tokens in their place: as if never there."""
    pages = build_pages([40], [1])
    batch, pool = pages.batch, pages.pool("box")
    drafts = replace(batch, key_cache=batch.key_cache.clone())
    ids, rows = batch.block_table[0, torch.arange(36, 40) // 16].long(), torch.arange(36, 40) % 16
    drafts.key_cache[ids, :, rows] = 1000.0
    for keys, start, length in ((drafts.key_cache, 0, 40), (batch.key_cache, 36, 38)):
        args = (int32(start), int32(length), batch.skips)
        module.summarise_pages(pool, keys, batch.block_table, *args, kind="box")
    right = pages.pool("box")
    args = (int32(0), int32(38), batch.skips)
    module.summarise_pages(right, batch.key_cache, batch.block_table, *args, kind="box")
    torch.testing.assert_close(pool, right, rtol=0, atol=0, equal_nan=True)
    assert pool[batch.block_table[0, 2]].max() < 100


def test_scores_by_hand() -> None:
    """Compute a row of one head with plain arithmetic, for every kind of score."""
    pages = build_pages([84], [1], kv_heads=1, group=1, skips=[21])
    q = pages.batch.query[0, 0].double()
    shape = len(pages.batch.key_cache), 1, 3, len(q)
    apart = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    logits: dict[str, list[float]] = {kind: [] for kind in SCORE_KINDS}
    for page in range(1, 5):
        keys = keys_of(pages, 0, page)[:, 0]
        std = (keys - keys.mean(0)).square().mean(0).sqrt()
        box = torch.maximum(q * keys.amax(0), q * keys.amin(0)).sum()
        logits["box"].append(float(box))
        logits["spread"].append(float(q @ keys.mean(0) + q.abs() @ std))
        block = int(pages.batch.block_table[0, page])
        logits["rows"].append(float((apart[block, 0].double() @ q).max()))
    for kind in SCORE_KINDS:
        right = (torch.tensor(logits[kind], dtype=torch.float64) / 8).softmax(0)
        out = scored(page_reference, pages, kind, **({"pool": apart} if kind == "rows" else {}))
        assert out.shape == (1, 1, 4)
        torch.testing.assert_close(out[0, 0].double(), right, rtol=1e-5, atol=1e-7)


@EACH_MODULE
def test_selection_by_hand(module: Any) -> None:
    """Choose among known scores: sinks, a hidden first page, recent pages, ties, whole tables."""
    pages = build_pages([100, 100, 30, 100], [1, 1, 1, 1], skips=[0, 20, 0, 0], kv_heads=2)
    scores = torch.full((4, 2, 6), -torch.inf)
    scores[0, 0] = torch.tensor([0.0, 0.3, 0.1, 0.3, 0.2, 0.1])
    scores[0, 1] = torch.tensor([0.0, 0.1, 0.4, 0.1, 0.3, 0.1])
    scores[1, :, :5] = torch.tensor([0.0, 0.5, 0.1, 0.2, 0.2])  # pages 1 .. 5
    scores[2, :, :1] = 1.0
    scores[3] = 0.1  # equal everywhere
    found = module.select_pages(
        pages.rows(), scores, int32(4, 3, 9, 4), sinks=0, recent=2, max_selected=5
    )
    assert found.counts.tolist() == [4, 3, 2, 4]
    assert found.pages[0].tolist() == [[1, 3, 5, 6, -1], [2, 4, 5, 6, -1]]
    assert found.pages[1].tolist() == [[1, 5, 6, -1, -1]] * 2  # the first hides 4 tokens
    assert found.pages[2].tolist() == [[0, 1, -1, -1, -1]] * 2
    assert found.pages[3].tolist() == [[0, 1, 5, 6, -1]] * 2
    assert found.seq_lens.tolist() == [3 * 16 + 4, 2 * 16 + 4, 16 + 14, 3 * 16 + 4]
    assert found.skips.tolist() == [0, 4, 0, 0]
    table = pages.batch.block_table
    for s in range(4):
        count = int(found.counts[s])
        for g in range(2):
            own = table[s, found.pages[s, g, :count].long()]
            assert torch.equal(found.block_table[s, g, :count], own)
            assert not found.block_table[s, g, count:].any()


@EACH_MODULE
def test_sinks_and_the_least_count(module: Any) -> None:
    """Take the pages that are always chosen even where they are more than the budget."""
    pages = build_pages([200], [1])
    scores = torch.rand((1, 2, 12), generator=torch.Generator().manual_seed(1))
    for budget, count in ((1, 5), (5, 5), (6, 6), (13, 13), (99, 13)):
        found = module.select_pages(pages.rows(), scores, int32(budget), sinks=2, recent=3)
        assert found.counts.tolist() == [count]
        for g in range(2):
            listed = found.pages[0, g, :count].tolist()
            assert listed == sorted(set(listed)) and {0, 1, 10, 11, 12} <= set(listed)
            best = sorted(range(2, 10), key=lambda page, g=g: -scores[0, g, page])
            assert set(listed) == {0, 1, 10, 11, 12} | set(best[: count - 5])


@EACH_MODULE
def test_the_result_goes_to_given_memory(module: Any) -> None:
    pages = build_pages([100, 60], [1, 1])
    held = PageSelection.empty(5, 2, 9, torch.device("cpu"))
    memory = torch.zeros(5, 2, 8)
    pool = pages.pool("box")
    pages.summarise(module, pool, "box")
    scores = module.score_pages(pages.rows(), Softmax(0.1), pool, kind="box", out=memory)
    assert scores.data_ptr() == memory.data_ptr() and scores.shape == (2, 2, 8)
    assert torch.equal(scores[:, :, :6], module.score_pages(
        pages.rows(), Softmax(0.1), pool, kind="box"))  # fmt: skip
    found = module.select_pages(pages.rows(), scores, int32(3, 3), out=held)
    right = module.select_pages(pages.rows(), scores, int32(3, 3))
    assert found.pages.data_ptr() == held.pages.data_ptr() and found.pages.shape == (2, 2, 9)
    assert torch.equal(found.pages[:, :, :3], right.pages)
    assert torch.equal(found.block_table[:, :, :3], right.block_table)
    assert not (found.pages[:, :, 3:] + 1).any()
    for name in ("counts", "seq_lens", "skips"):
        assert torch.equal(getattr(found, name), getattr(right, name))


@EACH_MODULE
def test_no_rows(module: Any) -> None:
    pages = build_pages([100], [1])
    rows = pages.rows(max_pages=7)
    none = torch.zeros(0, dtype=torch.int32)
    empty = replace(rows, query=rows.query[:0], requests=none, positions=none, skips=none)
    scores = module.score_pages(empty, Softmax(0.1), pages.pool("box"), kind="box")
    assert scores.shape[:2] == (0, 2)
    found = module.select_pages(empty, scores, none, max_selected=3)
    assert found.pages.shape == (0, 2, 3)
    pool, batch = pages.pool("box"), pages.batch
    module.summarise_pages(
        pool, batch.key_cache, batch.block_table[:0], none, none, none, kind="box"
    )
    assert pool.isnan().all()


def test_reference_attends_to_the_chosen_pages() -> None:
    """Compare with the softmax over the keys of the listed pages alone, in float64."""
    pages = build_pages([300, 84], [2, 1], skips=[37, 0])
    scores = scored(page_reference, pages, "spread")
    found = page_reference.select_pages(pages.rows(), scores, int32(5, 5, 3))
    assert found.counts.tolist() == [5, 5, 3]
    out = torch.empty(pages.batch.query.shape, dtype=torch.float64)
    attention, softmax = pages.attention(found), Softmax(0.125)
    reference.paged_attention(out, attention, softmax, compute_dtype=torch.float64)
    for s, r in enumerate(pages.requests.tolist()):
        for h in range(4):
            batch = pages.batch
            at = [
                page * 16 + i
                for page in found.pages[s, h // 2, : found.counts[s]].tolist()
                for i in range(16)
                if int(batch.skips[r]) <= page * 16 + i <= int(pages.positions[s])
            ]
            k, v = (
                torch.stack(
                    [cache[int(batch.block_table[r, p // 16]), h // 2, p % 16] for p in at]
                ).double()
                for cache in (batch.key_cache, batch.value_cache)
            )
            weights = (k @ batch.query[s, h].double() / 8).softmax(0)
            torch.testing.assert_close(out[s, h], weights @ v, rtol=1e-9, atol=1e-9)


def test_other_kernels_refuse_tables_of_heads(make_batch) -> None:
    batch = make_batch([100], [1])
    attention = replace(batch.attention(), block_table=torch.stack([batch.block_table] * 2, 1))
    out = torch.empty_like(batch.query)
    for module in (reference, cpu):
        with pytest.raises(ValueError, match=r"block.table"):
            module.topn_attention(out, attention, Softmax(0.1), int32(3))
        with pytest.raises(ValueError, match=r"block.table"):
            module.add_key_mass(torch.zeros(batch.key_cache.shape[:3]), attention, Softmax(0.1))
        with pytest.raises(ValueError, match="sliding_window 8"):
            module.paged_attention(out, attention, Softmax(0.1, sliding_window=8))
