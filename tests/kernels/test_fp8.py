# SPDX-License-Identifier: Apache-2.0
"""Caches of 8-bit floats: the C++ kernels on every instruction set, and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend, head_sinks, softmax_of
from tests.kernels.conftest import Batch
from tests.kernels.every_kernel import cpu, reference
from tests.kernels.readers import READERS, key_mass
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Softmax

KEY_SCALE, VALUE_SCALE = 0.37, 2.5
LENS, QUERY_LENS, SKIPS = [1, 37, 300, 700, 20], [1, 5, 300, 1, 0], [0, 11, 0, 160, 0]


@pytest.fixture(params=FP8_DTYPES, ids=["e4m3", "e5m2"])
def fp8(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def quantised(made: Batch, fp8: torch.dtype) -> AttentionBatch:
    """Convert the batch to an 8-bit cache with numbers of both signs and subnormal ones."""
    keys, values = (x.clone() for x in (made.key_cache, made.value_cache))
    keys[..., ::5] *= 2.0**-9
    values[..., ::7] *= 2.0**-12
    return replace(
        made.attention(),
        key_cache=(keys / KEY_SCALE).to(fp8),
        value_cache=values.to(fp8),
        key_scale=KEY_SCALE,
        value_scale=VALUE_SCALE,
    )


def dequantised(batch: AttentionBatch) -> AttentionBatch:
    """Return the same batch in float64, without scales."""
    return replace(
        batch,
        key_cache=batch.key_cache.double() * batch.key_scale,
        value_cache=batch.value_cache.double() * batch.value_scale,
        key_scale=1.0,
        value_scale=1.0,
    )


def test_every_number_is_read_exactly(each_isa: Any, fp8: torch.dtype) -> None:
    """Attend to one key per request: the output is its value, the log-sum-exp a component."""
    for head_size in (8, 24, 64):
        tokens = -(-256 // head_size)
        bits = (torch.arange(tokens * head_size) % 256).to(torch.uint8)
        cache = bits.view(tokens, 1, 1, head_size).view(fp8)
        numbers = cache.float().view(tokens, head_size)
        shape = {
            "block_table": torch.arange(tokens, dtype=torch.int32)[:, None],
            "seq_lens": torch.ones(tokens, dtype=torch.int32),
            "skips": torch.zeros(tokens, dtype=torch.int32),
            "query_start_loc": torch.arange(tokens + 1, dtype=torch.int32),
        }
        for isa in each_isa():
            for dtype in (torch.bfloat16, torch.float32):
                for heads in (1, 40):  # 40 rows: packed tiles
                    query = torch.zeros(tokens, heads, head_size, dtype=dtype)
                    batch = AttentionBatch(query, cache, cache, **shape, value_scale=VALUE_SCALE)
                    out, _ = attend(cpu, batch, Softmax(1.0))
                    right = (numbers * VALUE_SCALE)[:, None].expand(-1, heads, -1)
                    # A number that is none makes the logits none, and so the whole row.
                    whole = numbers.isfinite().all(dim=1)
                    assert torch.equal(out[whole], right[whole]), (isa, dtype, head_size, heads)
                    assert out[~whole].isnan().any(dim=-1).all(), (isa, dtype, head_size, heads)
                for d in range(0, head_size, 3):
                    query = torch.zeros(tokens, 1, head_size, dtype=dtype)
                    query[..., d] = 1
                    batch = AttentionBatch(query, cache, cache, **shape, key_scale=4.0)
                    _, lse = attend(cpu, batch, Softmax(0.5))
                    # The logarithm of one, which may be off by the last bit. The smallest number
                    # is 1.5e-5.
                    torch.testing.assert_close(
                        lse[whole, 0], 2 * numbers[whole, d], rtol=1e-6, atol=1e-7, msg=isa
                    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("group", "head_size"), [(1, 64), (4, 128), (8, 32), (3, 40), (8, 512), (2, 8), (1, 96)]
)
def test_attention(make_batch, check_attention, fp8, dtype, group, head_size) -> None:
    shape = {"group": group, "head_size": head_size, "seed": group + head_size, "dtype": dtype}
    batch = quantised(make_batch(LENS, QUERY_LENS, skips=SKIPS, **shape), fp8)
    check_attention(batch, dequantised(batch))


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 20}, {"soft_cap": 1.5}, {"sinks": head_sinks(4), "soft_cap": 2.0}],
    ids=["window", "cap", "sinks"],
)
def test_attention_options(make_batch, check_attention, fp8, layout, options) -> None:
    made = make_batch(LENS, QUERY_LENS, dtype=torch.bfloat16, layout=layout)
    batch = quantised(made, fp8)
    check_attention(batch, dequantised(batch), **options)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window scores", {"gqa_reduce": "max"}),
        ("window scores", {"gqa_reduce": "max", "sinks": True}),
        ("recent mass", {}),
        ("key mass", {}),
    ],
)
def test_scores(make_batch, check_reader, fp8, name, options, group) -> None:
    reader = READERS[name]
    batch = quantised(
        make_batch(reader.lens, reader.queries, group=group, dtype=torch.bfloat16), fp8
    )
    if "sinks" in options:
        options = options | {"sinks": head_sinks(2 * group)}
    check_reader(reader, batch, dequantised(batch), **options)


def test_below_average(make_batch, each_isa, fp8) -> None:
    batch = quantised(make_batch(LENS, QUERY_LENS, skips=SKIPS, group=4), fp8)
    softmax, kind = softmax_of(batch), {"kind": "below_average"}
    right = key_mass(reference, dequantised(batch), softmax, **kind, compute_dtype=torch.float64)
    assert torch.equal(key_mass(reference, batch, softmax, **kind), right)
    for isa in each_isa():
        for lse in (None, attend(cpu, batch, softmax)[1]):
            assert torch.equal(key_mass(cpu, batch, softmax, **kind, log_sum_exp=lse), right), isa


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_topn_attention(make_batch, each_isa, fp8, dtype, renormalize) -> None:
    batch = quantised(make_batch(LENS, QUERY_LENS, skips=SKIPS, dtype=dtype, group=4), fp8)
    softmax = softmax_of(batch)

    def best(module: Any, of: AttentionBatch, **more: Any) -> torch.Tensor:
        out = torch.full(of.query.shape, 7.0, dtype=more.get("compute_dtype", torch.float32))
        top_ns = torch.tensor([3, 4, 0, 32, 5], dtype=torch.int32)
        module.topn_attention(out, of, softmax, top_ns, renormalize=renormalize, **more)
        return out

    right = best(reference, dequantised(batch), compute_dtype=torch.float64)
    torch.testing.assert_close(best(reference, batch).double(), right, rtol=1e-4, atol=1e-4)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-4
    largest = right.abs().max().item()
    for isa in each_isa():
        error = (best(cpu, batch) - right).abs().max().item()
        assert error <= close * largest, f"{isa}: error {error}, largest {largest}"


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0])
def test_writes_round_as_torch_does(each_isa, fp8, source, scale) -> None:
    """Write every bfloat16 or float16, and floats in between: saturated, to nearest, to even."""
    if source == torch.float32:
        generator = torch.Generator().manual_seed(0)
        powers = torch.randint(-20, 18, (1 << 16,), generator=generator)
        numbers = torch.randn(1 << 16, generator=generator) * 2.0**powers
    else:
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(source)
    rows = numbers.view(-1, 2, 64)
    slots = torch.arange(len(rows)) * 2 + 1
    slots[5] = -1  # padding

    def written(module: Any, values: torch.Tensor) -> torch.Tensor:
        caches = torch.zeros(2, len(rows), 2, 2, 64, dtype=torch.uint8).view(fp8)
        scales = {"key_scale": scale, "value_scale": 2 * scale}
        module.reshape_and_cache(rows, values, *caches, slots, **scales)
        return caches

    most = torch.finfo(fp8).max
    right = torch.zeros(2, len(rows), 2, 2, 64, dtype=torch.uint8).view(fp8)
    for i, factor in enumerate((scale, 2 * scale)):
        right[i, :, :, 1] = (rows.float() / factor).clamp(-most, most).to(fp8)
    right[:, 5] = 0
    number = ~right.float().isnan()
    assert number.sum() > 0.9 * number.numel()
    for isa in (*list(each_isa()), "reference"):
        if isa == "reference":
            found = written(reference, rows)
        else:
            cpu.set_isa(isa)
            found = written(cpu, rows)
        assert found.float().isnan().equal(~number), isa
        assert found.view(torch.uint8)[number].equal(right.view(torch.uint8)[number]), isa


def test_moves_copy_bytes(make_batch, fp8) -> None:
    """Write every bit pattern, also those of NaN."""
    made = make_batch([300, 95], [1, 1], group=1)
    key, value = (
        torch.randint(0, 256, made.key_cache.shape, dtype=torch.uint8).view(fp8) for _ in range(2)
    )
    kept = torch.stack(
        [torch.stack([torch.randperm(95)[:40].sort().values for _ in range(2)]) for _ in range(2)]
    ).int()
    lens, keeps = torch.tensor([300, 95], dtype=torch.int32), torch.tensor([40, 33]).int()
    caches = [[x.clone() for x in (key, value)] for _ in range(2)]
    for module, (k, v) in zip((cpu, reference), caches, strict=True):
        module.compact(k, v, made.block_table, kept, lens, keeps)
    for ours, right in zip(*caches, strict=True):
        assert ours.view(torch.uint8).equal(right.view(torch.uint8))
        assert not ours.view(torch.uint8).equal(key.view(torch.uint8))


def test_bad_scales_and_dtypes_raise(make_batch, fp8) -> None:
    batch = quantised(make_batch([40], [4]), fp8)
    for change in ({"key_scale": 0.0}, {"value_scale": -1.0}, {"key_scale": float("inf")}):
        with pytest.raises(ValueError, match="scale must be positive"):
            attend(cpu, replace(batch, **change), Softmax(1.0))
    with pytest.raises(ValueError, match="query has dtype"):
        attend(cpu, replace(batch, query=batch.query.to(fp8)), Softmax(1.0))
    rows = torch.zeros(1, 2, 64)
    for change in ({"key_scale": -1.0}, {"value_scale": 0.0}):
        slots = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(ValueError, match="scale must be positive"):
            cpu.reshape_and_cache(rows, rows, batch.key_cache, batch.value_cache, slots, **change)
