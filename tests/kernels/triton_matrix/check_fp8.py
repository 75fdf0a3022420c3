# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on caches of 8-bit floats, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.every_kernel import reference, triton_ops
from tests.kernels.readers import READERS
from vllm_pyramid.kernels.records import FP8_DTYPES, Softmax

SCALES = {"key_scale": 0.37, "value_scale": 2.5}
# Numbers of the query's dtype: that of the products.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=FP8_DTYPES, ids=["e4m3", "e5m2"])
def fp8(request):
    return request.param


def batch_of(make_paged, fp8, dtype, lens, queries, skips=None, joint=True):
    paged = make_paged(lens, 2, 64, torch.float32, joint=joint)
    paged.key_cache[..., ::5] *= 2.0**-9  # subnormal numbers too
    paged.key_cache = (paged.key_cache / SCALES["key_scale"]).to(fp8)
    paged.value_cache = paged.value_cache.to(fp8)
    return replace(paged.batch(queries, lens, skips, seed=3, dtype=dtype), **SCALES)


def close(found, right, dtype):
    tolerance = 5e-5 if dtype == torch.float32 else 5 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_attention(make_paged, fp8, dtype, splits):
    lens, queries, skips = [150, 33, 90, 70], [1, 33, 1, 20], [37, 0, 0, 16]
    batch = batch_of(make_paged, fp8, dtype, lens, queries, skips)
    softmax = Softmax(0.125, soft_cap=3.0)
    right = torch.zeros(batch.query.shape, dtype=torch.float64, device=batch.query.device)
    lse, right_lse = (torch.zeros(batch.query.shape[:2], device=right.device) for _ in range(2))
    reference.paged_attention(
        right, batch, softmax, log_sum_exp=right_lse, compute_dtype=torch.float64
    )
    out = torch.zeros_like(batch.query)
    triton_ops.paged_attention(out, batch, softmax, log_sum_exp=lse, num_splits=splits)
    close(out, right, dtype)
    torch.testing.assert_close(lse, right_lse, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        *(("window scores", dtype, {}) for dtype in DTYPES),
        *(("key mass", torch.float32, {"kind": kind}) for kind in ("sum", "below_average")),
        ("recent mass", torch.float32, {}),
    ],
)
def test_scores(make_paged, fp8, name, dtype, options):
    batch = batch_of(make_paged, fp8, dtype, [150, 57], [20, 9], joint=name == "window scores")
    run, softmax = READERS[name].run, Softmax(0.125)
    right = run(reference, batch, softmax, **options, compute_dtype=torch.float64)
    found = run(triton_ops, batch, softmax, **options)
    torch.testing.assert_close(found, right, rtol=5e-4, atol=1e-6 if name == "key mass" else 1e-7)
    assert right[right.isfinite()].sum() > 1


@pytest.mark.parametrize("renormalize", [False, True])
def test_topn_attention(make_paged, ints, fp8, renormalize):
    batch = batch_of(make_paged, fp8, torch.float32, [150, 57, 70], [1, 3, 9])
    right = torch.zeros(batch.query.shape, dtype=torch.float64, device=batch.query.device)
    options = {"top_ns": ints([20, 5, 0]), "renormalize": renormalize}
    reference.topn_attention(right, batch, Softmax(0.125), compute_dtype=torch.float64, **options)
    out = torch.zeros_like(batch.query)
    triton_ops.topn_attention(out, batch, Softmax(0.125), **options)
    close(out, right, torch.float32)


@pytest.mark.parametrize("source", DTYPES)
def test_writes_round_as_torch_does(make_paged, fp8, source, device):
    """Write saturated, to nearest, ties to even; also subnormal numbers."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-18, 14, (64, 2, 64), generator=generator)
    rows = (torch.randn(64, 2, 64, generator=generator) * 2.0**powers).to(source)
    rows[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    rows[1, 0, :8] = torch.tensor([1.0625, 1.1875, 1.125, 1.375, 17.0, 19.0, 18.0, 448.0])
    rows = rows.to(device)
    slots = torch.arange(64, device=device) * 2 + 1
    found, right = (
        torch.zeros(2, 64, 2, 2, 64, dtype=torch.uint8, device=device).view(fp8) for _ in "fr"
    )
    for module, caches in ((triton_ops, found), (reference, right)):
        module.reshape_and_cache(rows, rows, *caches, slots, key_scale=1.0, value_scale=0.3)
    number = ~right.float().isnan()
    assert torch.equal(found.float().isnan(), ~number)
    assert torch.equal(found.view(torch.uint8)[number], right.view(torch.uint8)[number])


def test_queries_are_not_quantised(make_paged, fp8):
    batch = batch_of(make_paged, fp8, torch.float32, [40], [1])
    batch = replace(batch, query=batch.query.to(fp8))
    with pytest.raises(ValueError, match="8-bit floats are for caches"):
        triton_ops.paged_attention(batch.query, batch, Softmax(0.125))
