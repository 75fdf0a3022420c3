# SPDX-License-Identifier: Apache-2.0
"""`topn_attention`: the reference against plain arithmetic, C++ against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.arguments import softmax_options, take_softmax
from tests.kernels.every_kernel import cpu, reference
from vllm_pyramid.kernels.records import Softmax

LENS = [1, 37, 300, 700, 20, 130, 95]
QUERY_LENS = [1, 5, 90, 1, 0, 1, 2]
# All keys for some; a chunk of a prompt (0); more than there are; decode steps with few.
TOP_NS = [3, 4, 0, 32, 5, 500, 1]


def run(module: Any, batch: Any, top_ns: list[int], **options: Any) -> tuple[torch.Tensor, list]:
    """Return `(out, value_rows)`; the count begins at 7."""
    out = torch.full(batch.query.shape, float("nan"), dtype=torch.float32)
    rows = torch.full((len(top_ns),), 7)
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    module.topn_attention(
        out,
        batch.attention(),
        softmax,
        torch.tensor(top_ns, dtype=torch.int32),
        value_rows=rows,
        **options,
    )
    return out, rows.tolist()


def apart(batch: Any) -> Any:
    """Move V of the batch to a memory of its own: dense pages, NaN where no token is."""
    batch.value_cache = batch.value_cache.clone(memory_format=torch.contiguous_format)
    return batch


@pytest.fixture
def assert_equal(each_isa) -> Callable[..., None]:
    """Check on every instruction set: close to float64, and the same rows counted."""

    def check(batch: Any, top_ns: list[int], **options: Any) -> None:
        right, rows = run(reference, batch, top_ns, compute_dtype=torch.float64, **options)
        low = batch.query.dtype != torch.float32
        for isa in each_isa():
            out, found = run(cpu, batch, top_ns, **options)
            assert found == rows
            torch.testing.assert_close(
                out, right, rtol=1e-2 if low else 1e-4, atol=1e-2 if low else 1e-5,
                msg=lambda text, isa=isa: f"{isa}: {text}",
            )  # fmt: skip

    return check


def test_reference_by_hand(make_batch) -> None:
    """Compute a decode step of one head: softmax over all keys, the three largest, their V."""
    batch = make_batch([50], [1], kv_heads=1, group=1)
    k = reference.gather_tokens(batch.key_cache, batch.block_table[0], 0, 50)[:, 0].double()
    v = reference.gather_tokens(batch.value_cache, batch.block_table[0], 0, 50)[:, 0].double()
    weights = (k @ batch.query[0, 0].double() / 8).softmax(dim=0)
    best = weights.argsort(descending=True)[:3]
    plain = (weights[best, None] * v[best]).sum(dim=0)
    out, rows = run(reference, batch, [3], compute_dtype=torch.float64)
    torch.testing.assert_close(out[0, 0].double(), plain, rtol=1e-6, atol=1e-6)
    assert rows == [7 + 3]
    out, _ = run(reference, batch, [3], renormalize=True, compute_dtype=torch.float64)
    torch.testing.assert_close(out[0, 0].double(), plain / weights[best].sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("module", [cpu, reference])
def test_ties_go_to_the_lower_position(make_batch, module) -> None:
    batch = apart(make_batch([40], [1], kv_heads=1, group=1))
    ids, rows = batch.block_table[0, torch.arange(40) // 16].long(), torch.arange(40) % 16
    batch.key_cache[ids, :, rows] = 0.0
    batch.value_cache[ids, :, rows] = torch.arange(40.0)[:, None, None].expand(-1, 1, 64)
    out, _ = run(module, batch, [5], renormalize=True)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))  # the mean of 0 .. 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (4, 40), (7, 128), (8, 256), (3, 512)])
def test_matches_reference(make_batch, assert_equal, dtype, group, head_size) -> None:
    shape = {"dtype": dtype, "group": group, "head_size": head_size, "seed": group}
    assert_equal(apart(make_batch(LENS, QUERY_LENS, **shape)), TOP_NS)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("options", softmax_options(), ids=["near", "cap", "low", "sinks", "all"])
def test_options(make_batch, assert_equal, options, renormalize) -> None:
    batch = apart(make_batch(LENS, QUERY_LENS, block_size=32))
    assert_equal(batch, TOP_NS, renormalize=renormalize, **options)


@pytest.mark.parametrize("block_size", [8, 32, 48])
def test_skips_and_queries_that_see_nothing(make_batch, assert_equal, block_size) -> None:
    skips = [131, 48, 5, 93]
    batch = apart(make_batch([300, 95, 700, 95], [1, 20, 1, 4], skips=skips, block_size=block_size))
    assert_equal(batch, [16, 9, 100, 1])
    out, _ = run(cpu, batch, [16, 9, 100, 1])
    assert not out[22:24].any()  # the last request's first two queries


def test_all_keys_are_paged_attention_bit_for_bit(make_batch, each_isa) -> None:
    """Compare on one thread and two, also in a batch with requests that choose."""
    batch = make_batch(LENS, QUERY_LENS, dtype=torch.bfloat16)
    plain = torch.empty(batch.query.shape)
    starts = batch.query_start_loc.tolist()
    for _ in each_isa():
        cpu.paged_attention(plain, batch.attention(), Softmax(0.125))
        out, _ = run(cpu, batch, [0, 37, 300, 701, 0, 130, 9999])
        assert torch.equal(out, plain)
        out, _ = run(cpu, batch, TOP_NS)
        for r in (0, 2, 5):
            assert torch.equal(out[starts[r] : starts[r + 1]], plain[starts[r] : starts[r + 1]])


def test_company_and_threads_change_nothing(make_batch, two_threads) -> None:
    batch = make_batch([900, 640, 500], [1, 1, 3])
    together, _ = run(cpu, batch, [64, 5, 33])
    torch.set_num_threads(1)
    assert torch.equal(run(cpu, batch, [64, 5, 33])[0], together)
    for r, rows in enumerate((slice(0, 1), slice(1, 2), slice(2, 5))):
        assert torch.equal(run(cpu, batch.one(r), [[64, 5, 33][r]])[0], together[rows])


def test_many_requests_on_two_threads(make_batch, two_threads) -> None:
    """Repeat enough work for the second thread to get a part of it."""
    lens = [600 + 7 * r for r in range(24)]
    batch = make_batch(lens, [1] * 24, kv_heads=4, group=4)
    together, rows = run(cpu, batch, [40] * 24)
    assert rows == [7 + 40 * 16] * 24
    for _ in range(20):
        assert torch.equal(run(cpu, batch, [40] * 24)[0], together)
    torch.set_num_threads(1)
    assert torch.equal(run(cpu, batch, [40] * 24)[0], together)


def test_only_the_chosen_rows_of_v_are_read(make_batch) -> None:
    """Poison everything else in V: one row of it would make the output NaN."""
    batch = apart(make_batch([640], [1], kv_heads=2, group=2))
    right, rows = run(cpu, batch, [4])
    assert rows == [7 + 4 * 4]
    k = reference.gather_tokens(batch.key_cache, batch.block_table[0], 0, 640)
    poisoned = torch.full_like(batch.value_cache, float("nan"))
    for head in range(4):
        best = (k[:, head // 2] @ batch.query[0, head]).argsort(descending=True)[:4]
        blocks, places = batch.block_table[0, best // 16].long(), best % 16
        poisoned[blocks, head // 2, places] = batch.value_cache[blocks, head // 2, places]
    batch.value_cache = poisoned
    assert torch.equal(run(cpu, batch, [4])[0], right)
