# SPDX-License-Identifier: Apache-2.0
"""Caches of 8-bit floats: the C++ kernels on every instruction set, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.arguments import attend, head_sinks, softmax_of
from tests.kernels.conftest import Batch
from tests.kernels.every_kernel import cpu, reference
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Reduction, Softmax
from vllm_pyramid.methods.thinning.kernels import RecentBatch

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


@pytest.fixture
def check_attention(each_isa: Any) -> Callable[..., None]:
    """Allow at most twice PyTorch's error in the dtype of the queries, on every instruction set."""

    def check(batch: AttentionBatch, **options: Any) -> None:
        softmax, plain = softmax_of(batch, **options), dequantised(batch)
        right, right_lse = attend(reference, plain, softmax, compute_dtype=torch.float64)
        rough, _ = attend(reference, plain, softmax, compute_dtype=batch.query.dtype)
        allowed = 2 * (rough - right).abs().max().item() + 2e-6
        for isa in each_isa():
            found, lse = attend(cpu, batch, softmax)
            error = (found - right).abs().max().item()
            assert error <= allowed, f"{isa}: error {error:.3g}, allowed {allowed:.3g}"
            torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)
        found, lse = attend(reference, batch, softmax)
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)

    return check


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
    check_attention(quantised(make_batch(LENS, QUERY_LENS, skips=SKIPS, **shape), fp8))


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 20}, {"soft_cap": 1.5}, {"sinks": head_sinks(4), "soft_cap": 2.0}],
    ids=["window", "cap", "sinks"],
)
def test_attention_options(make_batch, check_attention, fp8, layout, options) -> None:
    made = make_batch(LENS, QUERY_LENS, dtype=torch.bfloat16, layout=layout)
    check_attention(quantised(made, fp8), **options)


@pytest.fixture
def check_scores(each_isa: Any) -> Callable[..., None]:
    """Compare `run(module, batch, **more)` with float64, also by attention's log-sum-exp."""

    def check(run: Any, batch: AttentionBatch, softmax: Softmax, **close: float) -> None:
        right = run(reference, dequantised(batch), compute_dtype=torch.float64)
        torch.testing.assert_close(run(reference, batch), right, **close)
        for isa in each_isa():
            for lse in (None, attend(cpu, batch, softmax)[1]):
                found = run(cpu, batch, log_sum_exp=lse)
                torch.testing.assert_close(found, right, **close, msg=isa)

    return check


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("sinks", [False, True])
def test_window_scores(make_batch, check_scores, fp8, group, sinks) -> None:
    made = make_batch([1100, 57, 300], [20, 16, 9], group=group, dtype=torch.bfloat16)
    batch = quantised(made, fp8)
    softmax = softmax_of(batch, sinks=head_sinks(2 * group) if sinks else None)

    def run(module: Any, of: AttentionBatch, **more: Any) -> torch.Tensor:
        windows = replace(made.windows(8), key_cache=of.key_cache, key_scale=of.key_scale)
        return module.window_scores(windows, softmax, Reduction("max", "avg", 5), **more)

    check_scores(run, batch, softmax, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", ["sum", "below_average"])
def test_key_mass(make_batch, check_scores, fp8, kind) -> None:
    batch = quantised(make_batch(LENS, QUERY_LENS, skips=SKIPS, group=4), fp8)
    softmax = softmax_of(batch)

    def run(module: Any, of: AttentionBatch, **more: Any) -> torch.Tensor:
        found = torch.zeros(of.key_cache.shape[:3])
        module.add_key_mass(found, of, softmax, kind=kind, **more)
        return found

    check_scores(run, batch, softmax, rtol=1e-4, atol=1e-6)


def test_recent_mass(make_batch, check_scores, fp8) -> None:
    made = make_batch([41, 300, 700], [30, 250, 500], dtype=torch.bfloat16, group=3)
    batch = quantised(made, fp8)
    softmax = softmax_of(batch)

    def run(module: Any, of: AttentionBatch, **more: Any) -> torch.Tensor:
        recents, contexts = torch.tensor([[6, 64, 137], [24, 180, 363]], dtype=torch.int32)
        recent = RecentBatch(
            *(of.query, of.key_cache, of.block_table, of.query_start_loc[1:].clone()),
            *(of.seq_lens, of.skips, recents, contexts),
            key_scale=of.key_scale,
        )
        return module.recent_mass(recent, softmax, distance_weight=1.2, **more)

    check_scores(run, batch, softmax, rtol=2e-4, atol=1e-7)


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
