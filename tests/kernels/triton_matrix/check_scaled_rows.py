# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on rows with scales of their own, against the reference on plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.arguments import INTERPRETED, WHERE
from tests.kernels.every_kernel import cpu, reference, triton_ops
from vllm_pyramid.attention.cache_parts import parts_of_scaled_rows
from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.thinning.kernels import RecentBatch

pytestmark = WHERE

SIZE, HEADS = 64, 2
# Numbers of the query's dtype: that of the products.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=[torch.int8, torch.float8_e4m3fn], ids=["int8", "e4m3"])
def stored(request):
    return request.param


class Rows:
    """Make a pool of such rows with their batch, and `plain`, the same batch dequantised."""

    def __init__(self, make_paged, stored, dtype, lens, queries, skips=None):
        self.paged = make_paged(lens, HEADS, SIZE, torch.float32)
        self.stored = stored
        shape = (*self.paged.key_cache.shape[:3], 2 * (SIZE + 4))
        memory = torch.int8 if stored == torch.int8 else torch.uint8
        self.memory = torch.zeros(shape, dtype=memory, device=self.paged.key_cache.device)
        parts = self.parts = parts_of_scaled_rows(self.memory, stored)
        most = 127.0 if stored == torch.int8 else 448.0
        of_token = torch.rand(shape[:3], generator=torch.Generator().manual_seed(5)) * 4 + 0.1
        for cache, numbers, scales in (
            (self.paged.key_cache, parts.keys, parts.scales["key_scales"]),
            (self.paged.value_cache, parts.values, parts.scales["value_scales"]),
        ):
            # No two rows are of one size; NaN stays in the scales of rows that are not there.
            cache *= of_token.to(cache.device)[..., None]
            scales.copy_(cache.abs().amax(dim=-1) / most)
            number = cache.nan_to_num(0.0) / scales.nan_to_num(1.0)[..., None]
            numbers.copy_((number.round() if stored == torch.int8 else number).to(stored))
        made = self.paged.batch(queries, lens, skips, seed=3, dtype=dtype)
        self.lens, self.query = made.seq_lens, made.query
        self.batch = replace(made, key_cache=parts.keys, value_cache=parts.values, **parts.scales)

    @property
    def plain(self):
        batch, scales = self.batch, self.parts.scales
        return replace(
            batch,
            key_cache=batch.key_cache.double() * scales["key_scales"].double()[..., None],
            value_cache=batch.value_cache.double() * scales["value_scales"].double()[..., None],
            key_scales=None,
            value_scales=None,
        )


def windows(batch: AttentionBatch) -> WindowBatch:
    inputs = batch.query, batch.key_cache, batch.block_table, batch.query_start_loc[1:]
    return WindowBatch(*inputs, batch.seq_lens, 8, key_scales=batch.key_scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("known", [False, True])
def test_window_scores(make_paged, stored, dtype, known):
    rows = Rows(make_paged, stored, dtype, [150, 57], [20, 9])
    softmax, reduction = Softmax(0.125, soft_cap=3.0), Reduction("mean", "avg", 5)
    lse = None
    if known:
        lse = torch.zeros(rows.query.shape[:2], device=rows.query.device)
        out = torch.zeros(rows.query.shape, dtype=torch.float64, device=lse.device)
        plain = rows.plain
        reference.paged_attention(out, plain, softmax, log_sum_exp=lse, compute_dtype=torch.float64)
    plain, own = windows(rows.plain), windows(rows.batch)
    right = reference.window_scores(plain, softmax, reduction, compute_dtype=torch.float64)
    by_reference = reference.window_scores(own, softmax, reduction, compute_dtype=torch.float64)
    torch.testing.assert_close(by_reference, right, rtol=1e-6, atol=1e-9)
    found = triton_ops.window_scores(own, softmax, reduction, log_sum_exp=lse)
    torch.testing.assert_close(found, right, rtol=5e-4, atol=1e-7)
    assert right.isfinite().sum() > 200


@pytest.mark.parametrize("kind", ["sum", "below_average"])
def test_key_mass(make_paged, stored, kind):
    lens, queries, skips = [150, 57, 70], [1, 9, 3], [37, 0, 16]
    rows = Rows(make_paged, stored, torch.float32, lens, queries, skips)
    shape, device = rows.memory.shape[:3], rows.memory.device
    right, by_reference, found = (torch.zeros(shape, device=device) for _ in range(3))
    softmax, options = Softmax(0.125), {"compute_dtype": torch.float64}
    reference.add_key_mass(right, rows.plain, softmax, kind=kind, **options)
    reference.add_key_mass(by_reference, rows.batch, softmax, kind=kind, **options)
    triton_ops.add_key_mass(found, rows.batch, softmax, kind=kind)
    torch.testing.assert_close(by_reference, right, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found, right, rtol=2e-4, atol=1e-6)
    assert right.sum() > 1


def test_recent_mass(make_paged, ints, stored):
    rows = Rows(make_paged, stored, torch.float32, [150, 57], [20, 9], [0, 16])
    softmax = Softmax(0.125)

    def recent(batch):
        return RecentBatch(
            *(batch.query, batch.key_cache, batch.block_table, batch.query_start_loc[1:]),
            *(batch.seq_lens, batch.skips, ints([20, 5]), ints([64, 30])),
            key_scales=batch.key_scales,
        )

    options = {"distance_weight": 1.2, "compute_dtype": torch.float64}
    right = reference.recent_mass(recent(rows.plain), softmax, **options)
    by_reference = reference.recent_mass(recent(rows.batch), softmax, **options)
    found = triton_ops.recent_mass(recent(rows.batch), softmax, distance_weight=1.2)
    torch.testing.assert_close(by_reference, right, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found, right, rtol=5e-4, atol=1e-7)
    assert right.sum() > 1


def test_scales_move_with_their_rows(make_paged, ints, stored):
    """Compare whole rows bit for bit: numbers and scales, K and V."""
    rows = Rows(make_paged, stored, torch.float32, [150, 57], [20, 9])
    scores = torch.rand(2, HEADS, 142, generator=torch.Generator().manual_seed(1))
    scores[1, :, 49:] = -torch.inf
    scores, keeps = scores.to(rows.memory.device), ints([40, 24])
    kept = reference.select(scores, rows.lens, keeps, window=8)
    table = rows.batch.block_table
    before = rows.memory.clone()
    expected = before.clone()
    triton_ops.compact(*rows.parts.rows, table, kept, rows.lens, keeps)
    reference.compact(*parts_of_scaled_rows(expected, stored).rows, table, kept, rows.lens, keeps)
    assert torch.equal(rows.memory, expected) and not torch.equal(expected, before)
    for r, (n, keep) in enumerate(((150, 40), (57, 24))):
        was = reference.gather_tokens(before, table[r], 0, n)
        now = reference.gather_tokens(rows.memory, table[r], n - keep, n)
        for g in range(HEADS):
            assert torch.equal(now[:, g], was[kept[r, g, :keep].long(), g])


def test_other_kernels_refuse_them(make_paged, ints, stored):
    """Check that the other kernels refuse numbers that they would not scale."""
    rows = Rows(make_paged, stored, torch.float32, [40, 30], [9, 9])
    batch, softmax, out = rows.batch, Softmax(0.125), torch.zeros_like(rows.query)
    top, mass = ints([8, 8]), torch.zeros(rows.memory.shape[:3], device=rows.memory.device)
    calls = [
        lambda ops: ops.paged_attention(out, batch, softmax),
        lambda ops: ops.topn_attention(out, batch, softmax, top),
    ]
    for ops in (triton_ops, reference):
        for call in calls:
            with pytest.raises(ValueError, match="one scale a layer"):
                call(ops)
    calls += [
        lambda ops: ops.add_key_mass(mass, batch, softmax),
        lambda ops: ops.window_scores(windows(batch), softmax, Reduction()),
    ]
    for call in calls if INTERPRETED else ():
        with pytest.raises(ValueError, match="one scale a layer"):
            call(cpu)
