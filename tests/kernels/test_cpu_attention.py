# SPDX-License-Identifier: Apache-2.0
"""The C++ paged attention against the reference in float64, on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend, head_sinks, softmax_of, softmax_options
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import Softmax

# One token, a short chunk, a prompt of several tiles of keys, a split context, nothing to do.
LENS = [1, 37, 300, 700, 20]
QUERY_LENS = [1, 5, 300, 1, 0]


def attended(module: Any, batch: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = attend(module, batch.attention(), softmax_of(batch, **options))[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_size", [32, 64, 128, 512])
def test_matches_reference(make_batch, check_attention, dtype, group, head_size) -> None:
    shape = {"dtype": dtype, "group": group, "head_size": head_size, "seed": group + head_size}
    check_attention(make_batch(LENS, QUERY_LENS, **shape).attention())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [8, 24, 40, 80, 96, 256, 504])
def test_other_head_sizes(make_batch, check_attention, dtype, head_size) -> None:
    batch = make_batch([130, 70], [1, 70], dtype=dtype, head_size=head_size, group=3)
    check_attention(batch.attention())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(5))
def test_options(make_batch, check_attention, dtype, number) -> None:
    batch = make_batch(LENS, QUERY_LENS, dtype=dtype).attention()
    check_attention(batch, **softmax_options(dtype)[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.6, 2.0])
def test_scores_far_apart(make_batch, check_attention, dtype, scale) -> None:
    """Attend where maxima rise by less than 2^8 in some tiles and by more in others."""
    batch = make_batch([700, 900], [700, 40], dtype=dtype, head_size=64)
    check_attention(batch.attention(), scale=scale)


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 48])
def test_layouts_and_skips(make_batch, check_attention, layout, block_size) -> None:
    batch = make_batch(
        [300, 95, 700, 64], [1, 20, 1, 6], skips=[131, 48, 5, 40], layout=layout,
        block_size=block_size, dtype=torch.bfloat16,
    )  # fmt: skip
    check_attention(batch.attention())


@pytest.mark.parametrize(("group", "queries"), [(5, 1), (7, 1), (4, 2), (3, 4), (16, 1), (4, 4)])
@pytest.mark.parametrize("block_size", [8, 16, 48])
def test_a_few_rows(make_batch, check_attention, group, queries, block_size) -> None:
    """Attend with rows that fill part of a vector, from any offset in a page."""
    batch = make_batch(
        [300, 95, 700, 64, 513], [queries] * 5, skips=[131, 48, 5, 40, 0], group=group,
        block_size=block_size, head_size=96, dtype=torch.bfloat16, seed=group,
    )  # fmt: skip
    for options in ({}, {"sliding_window": 37}, {"soft_cap": 2.0}):
        check_attention(batch.attention(), **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"sinks": head_sinks(4)}])
@pytest.mark.parametrize("queries", [1, 2, 40])
def test_a_query_that_sees_nothing_gets_zeros(
    make_batch, check_attention, queries, options
) -> None:
    """Attend with queries at positions below the skip, which the reference takes as C++ does."""
    batch = make_batch([64, 90], [queries, 90], skips=[64 - queries // 2, 90])
    check_attention(batch.attention(), **options)
    for module in (cpu, reference):
        out = attended(module, batch, **options)
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
    tailed = attended(cpu, batch)
    batch.block_table = batch.block_table[:, 10:].contiguous()
    batch.seq_lens, batch.skips = batch.seq_lens - 160, batch.skips * 0
    assert torch.equal(tailed, attended(cpu, batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch_or_threads(make_batch, two_threads, dtype) -> None:
    lens, query_lens = [900, 64, 3000, 411, 250], [1, 64, 1, 3, 250]
    batch = make_batch(lens, query_lens, dtype=dtype, group=4)
    together = attended(cpu, batch)
    torch.set_num_threads(1)
    assert torch.equal(together, attended(cpu, batch))
    starts = batch.query_start_loc.tolist()
    for r in range(len(lens)):
        assert torch.equal(together[starts[r] : starts[r + 1]], attended(cpu, batch.one(r)))


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_dtypes(make_batch, each_isa, query_dtype, out_dtype) -> None:
    batch = make_batch([40, 90], [1, 90], dtype=torch.bfloat16)
    batch.query = batch.query.to(query_dtype)
    right, _ = attend(reference, batch.attention(), Softmax(0.125), compute_dtype=torch.float64)
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
        attended(cpu, batch)


def test_bad_tensors_raise(make_batch) -> None:
    def refused(message: str, **change: torch.Tensor) -> None:
        batch = make_batch([100, 95], [4, 1])
        for name, value in change.items():
            setattr(batch, name, value)
        with pytest.raises(ValueError, match=message):
            attended(cpu, batch)

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
            attended(cpu, make_batch([10], [1], head_size=head_size))
