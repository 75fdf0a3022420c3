# SPDX-License-Identifier: Apache-2.0
"""`paged_attention(key_mass=...)` of the C++ kernels against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_pyramid.ops import cpu, reference

pytestmark = pytest.mark.cpu

LENS = [1, 37, 300, 700, 20]
QUERY_LENS = [1, 5, 90, 1, 0]


def mass_of(module: Any, batch: Any, columns: int, start: float = 0.0, **options: Any) -> Any:
    """`(out, key_mass)`; the mass begins at `start` everywhere."""
    requests, kv_heads = batch.seq_lens.numel(), batch.key_cache.shape[1]
    key_mass = torch.full((requests, kv_heads, columns), start)
    out = torch.empty(batch.query.shape, dtype=torch.float32)
    scale = batch.query.shape[2] ** -0.5
    module.paged_attention(out, *batch.inputs(), scale=scale, key_mass=key_mass, **options)
    return out, key_mass


@pytest.fixture
def assert_mass(each_isa: Callable[[], Iterator[str]]) -> Callable[..., None]:
    """On every instruction set: close to the reference, nothing behind the visible keys."""

    def check(batch: Any, **options: Any) -> None:
        columns = int((batch.seq_lens - batch.skips).max()) + 3
        _, right = mass_of(reference, batch, columns, compute_dtype=torch.float64, **options)
        for isa in each_isa():
            out, found = mass_of(cpu, batch, columns, **options)
            torch.testing.assert_close(
                found, right, rtol=1e-4, atol=1e-7, msg=lambda text, isa=isa: f"{isa}: {text}"
            )
            without = torch.empty_like(out)
            scale = batch.query.shape[2] ** -0.5
            cpu.paged_attention(without, *batch.inputs(), scale=scale, **options)
            assert torch.equal(out, without)

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_size", [40, 64, 128])
def test_matches_reference(make_batch, assert_mass, dtype, group, head_size) -> None:
    shape = {"dtype": dtype, "group": group, "head_size": head_size, "seed": group + head_size}
    assert_mass(make_batch(LENS, QUERY_LENS, **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 20},
        {"sliding_window": 100, "soft_cap": 3.0},
        {"soft_cap": 1.5},
        {"sinks": True},
        {"sinks": True, "soft_cap": 2.0, "sliding_window": 33},
    ],
    ids=str,
)
def test_options(make_batch, assert_mass, dtype, options) -> None:
    if "sinks" in options:
        options = options | {"sinks": torch.tensor([0.5, -2.0, 4.0, 1.0], dtype=dtype)}
    assert_mass(make_batch(LENS, QUERY_LENS, dtype=dtype), **options)


@pytest.mark.parametrize("block_size", [8, 16, 48])
def test_skips(make_batch, assert_mass, block_size) -> None:
    batch = make_batch(
        [300, 95, 700, 64], [1, 20, 1, 6], skips=[131, 48, 5, 40], layout="rows",
        block_size=block_size, dtype=torch.bfloat16,
    )  # fmt: skip
    assert_mass(batch)


def test_queries_that_see_nothing_give_nothing(make_batch, assert_mass) -> None:
    batch = make_batch([32], [4], skips=[30])
    assert_mass(batch)
    _, mass = mass_of(cpu, batch, 2)
    assert mass.sum() == pytest.approx(2 * 4)  # two of the four queries, four heads


@pytest.mark.parametrize("module", [cpu, reference])
def test_mass_is_added_and_sums_to_the_queries(make_batch, module) -> None:
    """Every query of every head shares out exactly 1; what was there stays."""
    batch = make_batch(LENS, QUERY_LENS, group=3)
    _, mass = mass_of(module, batch, 710, start=2.0)
    added = (mass - 2.0).sum(-1)
    expected = torch.tensor(QUERY_LENS)[:, None].expand(-1, 2) * 3.0
    torch.testing.assert_close(added, expected, rtol=1e-3, atol=1e-2)
    for r, n in enumerate(LENS):
        assert (mass[r, :, n:] == 2.0).all()
    assert (mass[4] == 2.0).all()


def test_a_view_of_a_wider_table_and_threads(make_batch, two_threads) -> None:
    batch = make_batch(LENS, QUERY_LENS, dtype=torch.bfloat16)
    _, right = mass_of(cpu, batch, 700)
    wide = torch.zeros(5, 4, 2, 800)
    torch.set_num_threads(1)
    cpu.paged_attention(
        torch.empty(batch.query.shape), *batch.inputs(), scale=0.125, key_mass=wide[:, 1, :, 50:750]
    )
    assert torch.equal(wide[:, 1, :, 50:750], right)
    wide[:, 1, :, 50:750] = 0
    assert not wide.any()


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 2, 99), torch.float32, "key_mass has 99 columns"),
        ((2, 3, 100), torch.float32, r"must be \[2, 2, columns\]"),
        ((2, 2, 100), torch.float64, "must be float32"),
        ((2, 200), torch.float32, r"\[R, G, columns\]"),
    ],
)
def test_bad_mass_raises(make_batch, module, shape, dtype, message) -> None:
    batch = make_batch([100, 95], [4, 1])
    with pytest.raises(ValueError, match=message):
        module.paged_attention(
            torch.empty(batch.query.shape),
            *batch.inputs(),
            scale=0.125,
            key_mass=torch.zeros(shape, dtype=dtype),
        )
