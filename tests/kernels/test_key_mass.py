# SPDX-License-Identifier: Apache-2.0
"""`add_key_mass` of the C++ kernels against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend, softmax_of, take_softmax
from tests.kernels.conftest import STALE_BLOCK
from tests.kernels.every_kernel import cpu, reference
from tests.kernels.readers import READERS, key_mass
from vllm_pyramid.kernels.records import Softmax

LENS = [1, 37, 300, 700, 20]
QUERY_LENS = [1, 5, 90, 1, 0]


def mass_of(module: Any, batch: Any, start: float = 0.0, **options: Any) -> torch.Tensor:
    """Return the mass in its pages, which begins at `start` everywhere."""
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    return key_mass(module, batch.attention(), softmax, start=start, **options)


def of_request(batch: Any, mass: torch.Tensor, r: int) -> torch.Tensor:
    """Return the mass of the tokens that request r sees: `[G, tokens]`."""
    skip, end = int(batch.skips[r]), int(batch.seq_lens[r])
    return reference.gather_tokens(mass[..., None], batch.block_table[r], skip, end)[..., 0].T


def lse_of(module: Any, batch: Any, **options: Any) -> torch.Tensor:
    """Return the log-sum-exp that the module's attention writes."""
    lse: torch.Tensor = attend(module, batch.attention(), softmax_of(batch, **options))[1]
    return lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [12, 40])
def test_one_query_of_many_heads(make_batch, check_reader, dtype, group) -> None:
    """Use packed tiles; of 40 rows the last 8 are few enough to use K in place."""
    batch = make_batch([300, 37], [1, 1], dtype=dtype, group=group, kv_heads=1)
    check_reader(READERS["key mass"], batch.attention())


@pytest.mark.parametrize("queries", [1, 30])
def test_a_window_leaves_freed_blocks_alone(make_batch, queries) -> None:
    """Check that table entries below the first query's window, which are invalid, are not read."""
    batch = make_batch([300, 95], [queries, queries], dtype=torch.bfloat16)
    for r, length in enumerate((300, 95)):
        batch.block_table[r, : (length - queries - 20 + 1) // 16] = STALE_BLOCK
    right = mass_of(reference, batch, sliding_window=20)
    for lse in (None, lse_of(cpu, batch, sliding_window=20)):
        found = mass_of(cpu, batch, sliding_window=20, log_sum_exp=lse)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


def test_queries_that_see_nothing_give_nothing(make_batch, check_reader) -> None:
    batch = make_batch([32], [4], skips=[30])
    check_reader(READERS["key mass"], batch.attention())
    mass = mass_of(cpu, batch)
    assert mass.sum() == pytest.approx(2 * 4)  # two of the four queries, four heads


@pytest.mark.parametrize("module", [cpu, reference])
def test_mass_is_added_and_sums_to_the_queries(make_batch, module) -> None:
    """Check that every query of every head adds exactly 1 in all, to the mass that was there."""
    batch = make_batch(LENS, QUERY_LENS, group=3)
    mass = mass_of(module, batch, 2.0) - 2.0
    assert not mass[mass_of(module, batch) == 0].any(), "others are written"
    for r, queries in enumerate(QUERY_LENS):
        expected = torch.full((2,), queries * 3.0)
        torch.testing.assert_close(
            of_request(batch, mass, r).sum(-1), expected, rtol=1e-3, atol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 1.5}], ids=str)
def test_below_average(make_batch, each_isa, dtype, options) -> None:
    """Compare counts, which may differ only where a weight is nearly the average."""
    batch = make_batch(LENS, QUERY_LENS, dtype=dtype, group=3)
    options = {"kind": "below_average", **options}
    right = mass_of(reference, batch, compute_dtype=torch.float64, **options)
    assert right.sum() > 5_000
    for isa in each_isa():
        shared = {name: value for name, value in options.items() if name != "kind"}
        for lse in (None, lse_of(cpu, batch, **shared)):
            found = mass_of(cpu, batch, **options, log_sum_exp=lse)
            assert (found == found.round()).all() and ((found - right).abs() <= 1).all(), isa
            assert (found != right).sum() <= 3, isa


@pytest.mark.parametrize("kind", ["sum", "below_average"])
def test_first_queries(make_batch, each_isa, kind) -> None:
    """Compare with a step that holds only the queries from the first one on."""
    batch = make_batch([300, 95, 64], [90, 20, 1], skips=[40, 0, 0])
    first = torch.tensor([275, 10, 64], dtype=torch.int32)
    right = mass_of(reference, batch, kind=kind, first_queries=first, compute_dtype=torch.float64)
    for isa in each_isa():
        for lse in (lse_of(cpu, batch), None):
            found = mass_of(cpu, batch, kind=kind, first_queries=first, log_sum_exp=lse)
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, msg=isa)
    assert not of_request(batch, right, 2).any() and of_request(batch, right, 1).any()
    batch.query_start_loc = torch.tensor([0, 25, 45], dtype=torch.int32)
    batch.query = torch.cat([batch.query[65:90], batch.query[90:110]])
    batch.seq_lens, batch.skips = batch.seq_lens[:2], batch.skips[:2]
    batch.block_table = batch.block_table[:2]
    assert torch.equal(mass_of(cpu, batch, kind=kind), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_the_bits(make_batch, each_isa, dtype) -> None:
    """Cut a prompt into steps of more than one query: the mass has the same bits."""
    batch = make_batch([300], [90], dtype=dtype, group=3)
    for isa in each_isa():
        at_once = mass_of(cpu, batch)
        mass = torch.zeros(batch.key_cache.shape[:3])
        for begin, end in ((0, 2), (2, 34), (34, 77), (77, 90)):
            chunk = replace(
                batch.attention(),
                query=batch.query[begin:end],
                query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
                seq_lens=torch.tensor([210 + end], dtype=torch.int32),
            )
            cpu.add_key_mass(mass, chunk, Softmax(0.125))
        assert torch.equal(mass, at_once), isa


def test_strides(make_batch) -> None:
    """Pass a view as the mass."""
    batch = make_batch(LENS, QUERY_LENS, dtype=torch.bfloat16)
    right = mass_of(cpu, batch)
    blocks, heads, rows = right.shape
    wide = torch.zeros(heads + 1, blocks, rows + 5)
    view = wide.transpose(0, 1)[:, :heads, :rows]
    cpu.add_key_mass(view, batch.attention(), Softmax(0.125))
    assert torch.equal(view, right)
    view.zero_()
    assert not wide.any()
