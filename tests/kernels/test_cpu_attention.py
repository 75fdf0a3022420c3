# SPDX-License-Identifier: Apache-2.0
"""The C++ paged attention against the reference in float64, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import head_sinks, softmax_options, take_softmax
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import Softmax

# One token, a short chunk, a prompt of several tiles of keys, a split context, nothing to do.
LENS = [1, 37, 300, 700, 20]
QUERY_LENS = [1, 5, 300, 1, 0]


def attend(batch: Any, **options: Any) -> torch.Tensor:
    tokens, heads, head_size = batch.query.shape
    wider = torch.full((tokens, heads + 1, head_size), 7.0, dtype=torch.float32)
    out = wider[:, :heads]  # of strides that the query has not
    softmax = take_softmax(options, head_size**-0.5)
    cpu.paged_attention(out, batch.attention(), softmax, **options)
    assert (wider[:, heads] == 7.0).all()
    return out


def exact(batch: Any, dtype: torch.dtype = torch.float64, **options: Any) -> torch.Tensor:
    out = torch.full(batch.query.shape, 7.0, dtype=torch.float64)
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    reference.paged_attention(out, batch.attention(), softmax, compute_dtype=dtype, **options)
    return out


@pytest.fixture
def assert_close(each_isa) -> Callable[..., None]:
    """Check on every instruction set: at most twice PyTorch's error in the dtype of the cache."""

    def check(batch: Any, **options: Any) -> None:
        right_lse, lse = (torch.full(batch.query.shape[:2], 9.0) for _ in range(2))
        right = exact(batch, **options, log_sum_exp=right_lse)
        allowed = 2 * (exact(batch, batch.query.dtype, **options) - right).abs().max().item() + 2e-6
        for isa in each_isa():
            found = attend(batch, **options)
            error = (found - right).abs().max().item()
            assert error <= allowed, f"{isa}: error {error:.3g}, allowed {allowed:.3g}"
            lse.fill_(9.0)
            assert torch.equal(attend(batch, **options, log_sum_exp=lse), found), isa
            torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_size", [32, 64, 128, 512])
def test_matches_reference(make_batch, assert_close, dtype, group, head_size) -> None:
    shape = {"dtype": dtype, "group": group, "head_size": head_size, "seed": group + head_size}
    assert_close(make_batch(LENS, QUERY_LENS, **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [8, 24, 40, 80, 96, 256, 504])
def test_other_head_sizes(make_batch, assert_close, dtype, head_size) -> None:
    assert_close(make_batch([130, 70], [1, 70], dtype=dtype, head_size=head_size, group=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(5))
def test_options(make_batch, assert_close, dtype, number) -> None:
    assert_close(make_batch(LENS, QUERY_LENS, dtype=dtype), **softmax_options(dtype)[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.6, 2.0])
def test_scores_far_apart(make_batch, assert_close, dtype, scale) -> None:
    """Attend where maxima rise by less than 2^8 in some tiles and by more in others."""
    assert_close(make_batch([700, 900], [700, 40], dtype=dtype, head_size=64), scale=scale)


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 48])
def test_layouts_and_skips(make_batch, assert_close, layout, block_size) -> None:
    batch = make_batch(
        [300, 95, 700, 64], [1, 20, 1, 6], skips=[131, 48, 5, 40], layout=layout,
        block_size=block_size, dtype=torch.bfloat16,
    )  # fmt: skip
    assert_close(batch)


@pytest.mark.parametrize(("group", "queries"), [(5, 1), (7, 1), (4, 2), (3, 4), (16, 1), (4, 4)])
@pytest.mark.parametrize("block_size", [8, 16, 48])
def test_a_few_rows(make_batch, assert_close, group, queries, block_size) -> None:
    """Attend with rows that fill part of a vector, from any offset in a page."""
    batch = make_batch(
        [300, 95, 700, 64, 513], [queries] * 5, skips=[131, 48, 5, 40, 0], group=group,
        block_size=block_size, head_size=96, dtype=torch.bfloat16, seed=group,
    )  # fmt: skip
    for options in ({}, {"sliding_window": 37}, {"soft_cap": 2.0}):
        assert_close(batch, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"sinks": head_sinks(4)}])
@pytest.mark.parametrize("queries", [1, 2, 40])
def test_a_query_that_sees_nothing_gets_zeros(make_batch, assert_close, queries, options) -> None:
    """Attend with queries at positions below the skip, which the reference takes as C++ does."""
    batch = make_batch([64, 90], [queries, 90], skips=[64 - queries // 2, 90])
    assert_close(batch, **options)
    for out in (attend(batch, **options), exact(batch, **options)):
        blind = queries - queries // 2
        assert not out[:blind].any() and not out[queries:].any()
        assert out[blind:queries].abs().amax(dim=(1, 2)).gt(0).all()


def test_window_leaves_freed_blocks_alone(make_batch) -> None:
    """Free the blocks before a sliding window: their table entries must not be read."""
    batch = make_batch([500, 200], [1, 4], skips=[480, 150])
    out, seen = (torch.empty(batch.query.shape) for _ in range(2))
    softmax = Softmax(1, sliding_window=16)
    everything = replace(batch.attention(), skips=torch.zeros(2, dtype=torch.int32))
    cpu.paged_attention(out, everything, softmax)
    cpu.paged_attention(seen, batch.attention(), softmax)
    assert not out.isnan().any()
    torch.testing.assert_close(out, seen, rtol=0, atol=2e-6)


@pytest.mark.parametrize("query_lens", [[1], [6], [90]])
def test_skip_is_a_shifted_table(make_batch, query_lens) -> None:
    """Check that survivors at the tail give the bits of a short sequence of their own."""
    batch = make_batch([700], query_lens, skips=[160], dtype=torch.bfloat16)
    tailed = attend(batch)
    batch.block_table = batch.block_table[:, 10:].contiguous()
    batch.seq_lens, batch.skips = batch.seq_lens - 160, batch.skips * 0
    assert torch.equal(tailed, attend(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch_or_threads(make_batch, two_threads, dtype) -> None:
    lens, query_lens = [900, 64, 3000, 411, 250], [1, 64, 1, 3, 250]
    batch = make_batch(lens, query_lens, dtype=dtype, group=4)
    together = attend(batch)
    torch.set_num_threads(1)
    assert torch.equal(together, attend(batch))
    starts = batch.query_start_loc.tolist()
    for r in range(len(lens)):
        assert torch.equal(together[starts[r] : starts[r + 1]], attend(batch.one(r)))


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_dtypes(make_batch, each_isa, query_dtype, out_dtype) -> None:
    batch = make_batch([40, 90], [1, 90], dtype=torch.bfloat16)
    batch.query = batch.query.to(query_dtype)
    right = exact(batch)
    for _ in each_isa():
        out = torch.empty(batch.query.shape, dtype=out_dtype)
        cpu.paged_attention(out, batch.attention(), Softmax(0.125))
        torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [300, 95]}, "holds 128"),
        ({"seq_lens": [3, 95]}, "4 queries but seq_lens says 3"),
        ({"skips": [0, 96]}, "skips of request 1 is 96"),
        ({"skips": [-1, 0]}, "skips of request 0 is -1"),
        ({"query_start_loc": [0, 4, 6]}, "query has 5 rows"),
        ({"query_start_loc": [0, 4, 3]}, "query_start_loc of request 1"),
        ({"query_start_loc": [0, 5]}, r"query_start_loc must be int32 \[3\]"),
    ],
)
def test_bad_values_raise(make_batch, change, message) -> None:
    batch = make_batch([100, 95], [4, 1])
    for name, values in change.items():
        setattr(batch, name, torch.tensor(values, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        attend(batch)


def test_bad_tensors_raise(make_batch) -> None:
    def refused(message: str, **change: torch.Tensor) -> None:
        batch = make_batch([100, 95], [4, 1])
        for name, value in change.items():
            setattr(batch, name, value)
        with pytest.raises(ValueError, match=message):
            attend(batch)

    batch = make_batch([100, 95], [4, 1])
    refused("names block", block_table=torch.full_like(batch.block_table, 99))
    refused("names block -1", block_table=torch.full_like(batch.block_table, -1))
    refused("int32", block_table=batch.block_table.long())
    refused("head_size|64", query=torch.zeros(5, 4, 32))
    refused("multiple of 2", query=torch.zeros(5, 3, 64))
    refused("unit stride", key_cache=batch.key_cache.transpose(2, 3))
    refused("differ", value_cache=batch.value_cache.bfloat16())
    refused("float64", query=batch.query.double())
    with pytest.raises(ValueError, match="scale must be positive"):
        cpu.paged_attention(torch.empty(5, 4, 64), batch.attention(), Softmax(0.0))
    for head_size in (12, 520):
        with pytest.raises(ValueError, match=f"head size {head_size}: .* multiples of 8 up to 512"):
            attend(make_batch([10], [1], head_size=head_size))
