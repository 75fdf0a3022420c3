# SPDX-License-Identifier: Apache-2.0
"""The records of the C++ kernels: names, sizes, and the field that each value fills."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.every_kernel import cpu
from tests.kernels.pages import build_pages
from vllm_pyramid.kernels.cpu import attention as cpu_attention
from vllm_pyramid.kernels.cpu import checks as cpu_checks
from vllm_pyramid.kernels.cpu import eviction as cpu_eviction
from vllm_pyramid.kernels.cpu import library as cpu_library
from vllm_pyramid.kernels.cpu import structs as cpu_records
from vllm_pyramid.kernels.records import Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.accumulated.kernels import cpu as mass_cpu
from vllm_pyramid.methods.host_values.kernels import cpu as value_cpu
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.observed_expected.kernels import cpu as expected_cpu
from vllm_pyramid.methods.pages.kernels import cpu as page_cpu
from vllm_pyramid.methods.pages.kernels.records import PageSelection
from vllm_pyramid.methods.thinning.kernels import RecentBatch
from vllm_pyramid.methods.thinning.kernels import cpu as recent_cpu

pytestmark = pytest.mark.cpu

HEADER = Path(__file__).parents[2] / "csrc" / "cpu" / "abi.h"

# All that pack records.
MODULES = (cpu_attention, cpu_eviction, mass_cpu, value_cpu, page_cpu, recent_cpu, expected_cpu)


def test_the_largest_head_size_is_the_librarys() -> None:
    """Compare the constant with the one that sizes arrays in C++."""
    text = HEADER.with_name("kernels.h").read_text()
    assert re.findall(r"kMaxHeadSize = (\d+);", text) == [str(cpu_checks.MAX_HEAD_SIZE)]


def record(name: str, fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def swapped(fields: list[Any], first: int, second: int) -> list[Any]:
    fields = list(fields)
    fields[first], fields[second] = fields[second], fields[first]
    return fields


SELECT = list(cpu_records.PyrSelect._fields_)
KEY_MASS = list(cpu_records.PyrKeyMass._fields_)


def test_a_definition_in_cpp_is_read() -> None:
    text = "void* out; const int32_t* table; int64_t R, M ; double scale; PyrAttention attention;"
    assert cpu_records.parse_fields(text) == [
        *("pointer out", "pointer table", "int64_t R", "int64_t M"),
        *("double scale", "PyrAttention attention"),
    ]
    assert cpu_records.fields_of(cpu_records.PyrKeyMass)[:2] == [
        "PyrAttention attention",
        "pointer mass",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            record("PyrSelect", swapped(SELECT, 10, 11)),
            "field 10 of PyrSelect to be `int64_t window`, and this package packs `int64_t sinks`",
        ),
        (
            record("PyrSelect", swapped(SELECT, 2, 3)),
            "field 2 of PyrSelect to be `pointer prompt_lens`, .* packs `pointer keeps`",
        ),
        (
            record("PyrKeyMass", swapped(KEY_MASS, 0, 1)),
            "field 0 of PyrKeyMass to be `PyrAttention attention`, .* packs `pointer mass`",
        ),
        (
            record("PyrSelect", [*SELECT[:4], ("R", ctypes.c_double), *SELECT[5:]]),
            "field 4 of PyrSelect to be `int64_t R`, and this package packs `double R`",
        ),
        (
            record("PyrSelect", [*SELECT, ("more", ctypes.c_int64)]),
            "field 13 of PyrSelect to be `nothing`, and this package packs `int64_t more`",
        ),
        (record("PyrSelect", SELECT[:-1]), "field 12 of PyrSelect to be `int64_t threads`"),
        (record("PyrUnknown", SELECT), "has no record PyrUnknown"),
    ],
)
def test_another_record_is_an_error(
    monkeypatch: pytest.MonkeyPatch, changed: type[ctypes.Structure], message: str
) -> None:
    """Refuse two fields of one size in another order, too, which no size tells apart."""
    others = [kept for kept in cpu_records.RECORDS if kept.__name__ != changed.__name__]
    monkeypatch.setattr(cpu_library, "RECORDS", (*others, changed))
    with pytest.raises(cpu_library.LibraryError, match=f"{message}.*; rebuild it"):
        cpu_library.load.__wrapped__()


def test_another_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ctypes.sizeof(cpu_records.PyrAttention)
    monkeypatch.setattr(ctypes, "sizeof", lambda record: 8)  # as if it were packed otherwise
    with pytest.raises(cpu_library.LibraryError, match=f"PyrAttention in {size} bytes.*into 8;"):
        cpu_library.load.__wrapped__()


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the record that a call packs, read back through its class."""

    def call(record: type[ctypes.Structure], function: Any, *inputs: Any, **options: Any) -> Any:
        seen: list[bytes] = []
        for module in MODULES:
            monkeypatch.setattr(module, "run", lambda name, bytes_: seen.append(bytes_))
        function(*inputs, **options)
        return record.from_buffer_copy(seen[0])

    return call


def check_attention(record: Any, batch: Any, softmax: Softmax) -> None:
    key, table = batch.key_cache, batch.block_table
    assert record.key == key.data_ptr() and record.table == table.data_ptr()
    assert record.query == batch.query.data_ptr()
    assert record.query_start == batch.query_start_loc.data_ptr()
    assert record.seq_lens == batch.seq_lens.data_ptr() and record.skips == batch.skips.data_ptr()
    assert tuple(batch.query.shape) == (record.T, record.H, record.D)
    assert tuple(key.shape) == (record.P, record.G, record.N, record.D)
    assert tuple(table.shape) == (record.R, record.M)
    assert (record.query_t, record.query_h) == batch.query.stride()[:2]
    assert (record.key_p, record.key_g, record.key_n) == key.stride()[:3]
    assert record.table_r == table.stride(0) and record.table_g == 0
    assert record.threads == torch.get_num_threads()
    assert (record.query_dtype, record.cache_dtype) == (1, 1)
    scale = softmax.scale * batch.key_scale
    assert (record.scale, record.soft_cap) == (scale, softmax.soft_cap)
    assert record.value_scale == batch.value_scale
    assert record.sliding_window == softmax.sliding_window


def test_attention(make_batch: Any, packed: Any) -> None:
    """Use values that all differ, so that none can take the place of another."""
    made = make_batch([100, 95, 60], [4, 1, 2], skips=[0, 3, 20], group=3, dtype=torch.bfloat16)
    batch = replace(made.attention(), value_cache=made.value_cache.clone()[..., :64])
    batch = replace(batch, key_scale=0.5, value_scale=7.0)
    sinks, lse = torch.zeros(6, dtype=torch.float16), torch.zeros(7, 6)
    softmax = Softmax(0.25, soft_cap=3.0, sliding_window=17, sinks=sinks)
    out = torch.zeros(6, 7, 64).transpose(0, 1)
    record = packed(
        cpu_records.PyrAttention, cpu.paged_attention, out, batch, softmax, log_sum_exp=lse
    )
    check_attention(record, batch, softmax)
    assert (record.out, record.value) == (out.data_ptr(), batch.value_cache.data_ptr())
    assert (record.out_t, record.out_h) == out.stride()[:2]
    assert (record.value_p, record.value_g, record.value_n) == batch.value_cache.stride()[:3]
    assert (record.sinks, record.log_sum_exp) == (sinks.data_ptr(), lse.data_ptr())
    assert (record.out_dtype, record.sinks_dtype) == (0, 2)

    lists = torch.stack([batch.block_table] * 2, 1)
    of_heads = replace(batch, block_table=lists)
    record = packed(cpu_records.PyrAttention, cpu.paged_attention, out, of_heads, Softmax(0.25))
    assert (record.table, record.M) == (lists.data_ptr(), lists.shape[2])
    assert (record.table_r, record.table_g) == lists.stride()[:2]

    mass, first = torch.zeros(made.key_cache.shape[:3]), torch.zeros(3, dtype=torch.int32)
    inputs = (cpu.add_key_mass, mass, batch, softmax)
    options = {"kind": "below_average", "first_queries": first, "log_sum_exp": lse}
    record = packed(cpu_records.PyrKeyMass, *inputs, **options)
    check_attention(record.attention, batch, softmax)
    assert record.attention.log_sum_exp == lse.data_ptr()
    assert (record.mass, record.first_queries) == (mass.data_ptr(), first.data_ptr())
    assert (record.mass_p, record.mass_g, record.kind) == (*mass.stride()[:2], 1)

    top_ns, rows = torch.ones(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    inputs = (cpu.topn_attention, out, batch, softmax, top_ns)
    record = packed(cpu_records.PyrTopn, *inputs, renormalize=True, value_rows=rows)
    check_attention(record.attention, batch, softmax)
    assert record.attention.value == batch.value_cache.data_ptr()
    assert (record.top_n, record.value_rows) == (top_ns.data_ptr(), rows.data_ptr())
    assert record.renormalize == 1


def test_scores(make_batch: Any, packed: Any) -> None:
    made = make_batch([100, 95, 60], [9, 10, 11], group=3, dtype=torch.bfloat16)
    query, key, table = made.query, made.key_cache, made.block_table
    ends, lse = made.query_start_loc[1:].clone(), torch.zeros(30, 6)
    sinks = torch.zeros(6, dtype=torch.float16)
    softmax = Softmax(0.25, soft_cap=3.0, sinks=sinks)

    def check(record: Any, columns: int) -> None:
        assert (record.query, record.key) == (query.data_ptr(), key.data_ptr())
        assert (record.table, record.query_ends) == (table.data_ptr(), ends.data_ptr())
        assert record.log_sum_exp == lse.data_ptr()
        assert tuple(query.shape) == (record.T, record.H, record.D)
        assert tuple(key.shape)[:3] == (record.P, record.G, record.N)
        assert (record.R, record.M, record.out_len) == (*table.shape, columns)
        assert (record.query_t, record.query_h) == query.stride()[:2]
        assert (record.key_p, record.key_g, record.key_n) == key.stride()[:3]
        assert (record.table_r, record.threads) == (table.stride(0), torch.get_num_threads())
        assert (record.query_dtype, record.cache_dtype) == (1, 1)
        assert (record.sinks, record.sinks_dtype) == (sinks.data_ptr(), 2)
        assert (record.scale, record.soft_cap) == (0.125, 3.0)

    prompts = WindowBatch(query, key, table, ends, made.seq_lens, 8, 120, key_scale=0.5)
    inputs = (prompts, softmax, Reduction("sum", "max", 7))
    record = packed(cpu_records.PyrScores, cpu.window_scores, *inputs, log_sum_exp=lse)
    check(record, 112)
    assert record.out and record.prompt_lens == made.seq_lens.data_ptr()
    assert (record.window, record.reduce, record.pooling, record.kernel_size) == (8, 2, 1, 7)

    own, future = made.value_cache.clone()[..., :64], torch.zeros(3, 6, 8, 64)
    starts, function = torch.full((3,), 7, dtype=torch.int32), cpu.observed_expected_scores
    inputs = (function, prompts, own, softmax, ScoreShape(3, 12, 9, 0.75))
    options = {"future": future, "starts": starts}
    record = packed(cpu_records.PyrObservedExpected, *inputs, **options)
    scores, record.scores.log_sum_exp = record.scores, lse.data_ptr()  # it has none of its own
    check(scores, 120)
    assert scores.out and scores.prompt_lens == made.seq_lens.data_ptr()
    assert (scores.window, scores.reduce, scores.pooling, scores.kernel_size) == (8, 0, 0, 9)
    assert (record.value, record.future) == (own.data_ptr(), future.data_ptr())
    assert (record.value_p, record.value_g, record.value_n) == own.stride()[:3]
    assert (record.starts, record.first, record.last) == (starts.data_ptr(), 3, 12)
    assert record.expected == 0.75

    skips, recents, contexts = (torch.full((3,), n, dtype=torch.int32) for n in (0, 5, 20))
    lens = made.seq_lens
    recent = RecentBatch(query, key, table, ends, lens, skips, recents, contexts, 33, 0.5)
    options = {"distance_weight": 1.5, "log_sum_exp": lse}
    record = packed(cpu_records.PyrRecentMass, cpu.recent_mass, recent, softmax, **options)
    check(record, 33)
    assert record.out and record.distance_weight == 1.5
    assert (record.seq_lens, record.skips) == (made.seq_lens.data_ptr(), skips.data_ptr())
    assert (record.recents, record.contexts) == (recents.data_ptr(), contexts.data_ptr())


def test_pages(packed: Any) -> None:
    """Use values that all differ, as above."""
    pages = build_pages([100, 95, 60], [4, 1, 2], skips=[0, 3, 20], group=3, dtype=torch.bfloat16)
    batch, pool = pages.batch, pages.pool("spread", torch.float16)
    key, table, lens, skips = batch.key_cache, batch.block_table, batch.seq_lens, batch.skips
    starts = torch.zeros_like(lens)
    inputs = (page_cpu.summarise_pages, pool, key, table, starts, lens, skips)
    record = packed(cpu_records.PyrSummaries, *inputs, kind="spread")
    assert (record.summaries, record.key) == (pool.data_ptr(), key.data_ptr())
    assert (record.table, record.starts) == (table.data_ptr(), starts.data_ptr())
    assert (record.seq_lens, record.skips) == (lens.data_ptr(), skips.data_ptr())
    assert (record.kind, record.cache_dtype, record.summary_dtype) == (1, 1, 2)
    assert tuple(key.shape) == (record.P, record.G, record.N, record.D)
    assert (record.R, record.M, record.table_r) == (*table.shape, table.stride(0))
    assert (record.key_p, record.key_g, record.key_n) == key.stride()[:3]
    assert (record.summary_p, record.summary_g) == pool.stride()[:2]
    assert record.threads == torch.get_num_threads()

    rows = replace(pages.rows(), key_scale=0.5)
    sinks, out = torch.zeros(6, dtype=torch.float16), torch.zeros(9, 2, 11)
    inputs = (page_cpu.score_pages, rows, Softmax(0.25, soft_cap=3.0, sinks=sinks), pool)
    record = packed(cpu_records.PyrPageScores, *inputs, kind="spread", combine="max", out=out)

    def check_rows(record: Any) -> None:
        assert (record.table, record.requests) == (table.data_ptr(), rows.requests.data_ptr())
        assert (record.positions, record.skips) == (
            rows.positions.data_ptr(),
            rows.skips.data_ptr(),
        )
        assert (7, 2, 16, *table.shape) == (record.S, record.G, record.N, record.R, record.M)
        assert (record.table_r, record.threads) == (table.stride(0), torch.get_num_threads())

    check_rows(record)
    assert (record.out, record.query) == (out.data_ptr(), batch.query.data_ptr())
    assert (record.pool, record.sinks) == (pool.data_ptr(), sinks.data_ptr())
    assert record.sinks_dtype == 2
    assert (record.kind, record.combine, record.query_dtype, record.pool_dtype) == (1, 1, 1, 2)
    assert (record.H, record.D, record.P, record.n, record.out_len) == (6, 64, len(pool), 1, 11)
    assert (record.query_t, record.query_h) == batch.query.stride()[:2]
    assert (record.pool_p, record.pool_g) == pool.stride()[:2]
    assert (record.scale, record.soft_cap) == (0.125, 3.0)
    record = packed(cpu_records.PyrPageScores, *inputs[:3], key, kind="rows", out=out)
    assert (record.kind, record.combine, record.pool_dtype, record.n) == (2, 0, 1, 16)
    assert (record.pool_p, record.pool_g, record.pool_n) == key.stride()[:3]

    scores, budgets = torch.zeros(8, 2, 13)[:, :, :12], torch.full_like(rows.positions, 4)
    chosen = PageSelection.empty(8, 2, 5, scores.device)
    inputs = (page_cpu.select_pages, rows, scores, budgets)
    record = packed(cpu_records.PyrPageSelect, *inputs, sinks=1, recent=2, out=chosen)
    check_rows(record)
    lists = (chosen.block_table, chosen.pages)
    assert (record.blocks, record.pages) == tuple(part.data_ptr() for part in lists)
    numbers = (chosen.counts, chosen.seq_lens)
    assert (record.counts, record.seq_lens) == tuple(part.data_ptr() for part in numbers)
    assert (record.hidden, record.budgets) == (chosen.skips.data_ptr(), budgets.data_ptr())
    assert (record.scores, record.out_len, record.scores_len) == (scores.data_ptr(), 5, 12)
    assert (record.scores_s, record.scores_g) == scores.stride()[:2]
    assert (record.sinks, record.recent) == (1, 2)


def test_moves(make_batch: Any, packed: Any) -> None:
    made = make_batch([100, 95, 60], [9, 10, 11], dtype=torch.bfloat16)
    key, value, table = made.key_cache, made.value_cache.clone(), made.block_table
    lens, keeps = made.seq_lens, torch.full((3,), 20, dtype=torch.int32)
    scores = torch.zeros(3, 2, 130)[..., :120]
    options = {"window": 8, "sinks": 4, "max_keep": 21}
    record = packed(cpu_records.PyrSelect, cpu.select, scores, lens, keeps, **options)
    assert record.out and record.scores == scores.data_ptr()
    assert (record.prompt_lens, record.keeps) == (lens.data_ptr(), keeps.data_ptr())
    assert (record.R, record.G, record.out_len, record.scores_len) == (3, 2, 21, 120)
    assert (record.scores_r, record.scores_g) == scores.stride()[:2]
    assert (record.window, record.sinks, record.threads) == (8, 4, torch.get_num_threads())

    def check_caches(record: Any) -> None:
        assert tuple(key.shape) == (record.P, record.G, record.N, record.D)
        assert (record.key_p, record.key_g, record.key_n) == key.stride()[:3]
        assert (record.value_p, record.value_g, record.value_n) == value.stride()[:3]
        assert (record.item_size, record.threads) == (2, torch.get_num_threads())

    kept = torch.zeros(3, 2, 30, dtype=torch.int32)[..., :25]
    record = packed(cpu_records.PyrCompact, cpu.compact, key, value, table, kept, lens, keeps)
    check_caches(record)
    assert (record.key, record.value) == (key.data_ptr(), value.data_ptr())
    assert (record.table, record.kept) == (table.data_ptr(), kept.data_ptr())
    assert (record.prompt_lens, record.keeps) == (lens.data_ptr(), keeps.data_ptr())
    assert (record.R, record.M, record.kept_len) == (*table.shape, 25)
    assert (record.table_r, record.kept_r, record.kept_g) == (table.stride(0), *kept.stride()[:2])

    new = torch.zeros(7, 5, 64, dtype=torch.bfloat16)
    new_key, new_value = new[:, :2], torch.zeros(7, 2, 64, dtype=torch.bfloat16)
    slots = torch.arange(6)
    inputs = (cpu.reshape_and_cache, new_key, new_value, key, value, slots)
    record = packed(cpu_records.PyrCacheWrite, *inputs)
    check_caches(record)
    assert (record.key, record.value) == (new_key.data_ptr(), new_value.data_ptr())
    assert (record.key_cache, record.value_cache) == (key.data_ptr(), value.data_ptr())
    assert (record.slots, record.T) == (slots.data_ptr(), 6)
    assert (record.key_t, record.key_h) == new_key.stride()[:2]
    assert (record.value_t, record.value_h) == new_value.stride()[:2]

    key, value = (x.to(torch.float8_e5m2) for x in (key, value))
    inputs = (cpu.reshape_and_cache, new_key, new_value, key, value, slots)
    record = packed(cpu_records.PyrCacheWrite, *inputs, key_scale=0.5, value_scale=7.0)
    assert (record.source_dtype, record.cache_dtype, record.item_size) == (1, 4, 1)
    assert (record.key_scale, record.value_scale) == (0.5, 7.0)
