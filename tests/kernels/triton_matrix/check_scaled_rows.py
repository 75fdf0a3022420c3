# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on rows with scales of their own, against the reference on plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.arguments import INTERPRETED, take_softmax
from tests.kernels.every_kernel import cpu, reference, triton_ops
from tests.kernels.readers import READERS, window_scores
from vllm_pyramid.attention.cache_parts import parts_of_scaled_rows
from vllm_pyramid.kernels.records import Softmax

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


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        *(("window scores", dtype, {"soft_cap": 3.0}) for dtype in DTYPES),
        *(("key mass", torch.float32, {"kind": kind}) for kind in ("sum", "below_average")),
        ("recent mass", torch.float32, {}),
    ],
)
def test_scores(make_paged, stored, name, dtype, options):
    """Also by attention's log-sum-exp over the plain numbers."""
    skips = [0, 0] if name == "window scores" else [37, 16]
    rows = Rows(make_paged, stored, dtype, [150, 57], [20, 9], skips)
    run, options = READERS[name].run, dict(options)
    softmax, exact = take_softmax(options, 0.125), {"compute_dtype": torch.float64}
    lse = torch.zeros(rows.query.shape[:2], device=rows.query.device)
    out = torch.zeros(rows.query.shape, dtype=torch.float64, device=lse.device)
    reference.paged_attention(out, rows.plain, softmax, log_sum_exp=lse, **exact)
    right = run(reference, rows.plain, softmax, **options, **exact)
    by_reference = run(reference, rows.batch, softmax, **options, **exact)
    torch.testing.assert_close(by_reference, right, rtol=1e-6, atol=1e-9)
    for known in (None, lse):
        found = run(triton_ops, rows.batch, softmax, **options, log_sum_exp=known)
        near = 1e-6 if name == "key mass" else 1e-7
        torch.testing.assert_close(found, right, rtol=5e-4, atol=near)
    assert right[right.isfinite()].sum() > 1


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
        lambda ops: window_scores(ops, batch, softmax),
    ]
    for call in calls if INTERPRETED else ():
        with pytest.raises(ValueError, match="one scale a layer"):
            call(cpu)
