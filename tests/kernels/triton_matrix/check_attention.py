# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` against the reference in float64: decode, prefill, mixed batches."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.arguments import take_softmax
from tests.kernels.every_kernel import reference, triton_ops
from tests.kernels.readers import window_scores
from vllm_pyramid.kernels.records import AttentionBatch, Softmax

# (KV heads, group, head size, dtype, joint K and V): every value of each at least once
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16, False),
    (2, 4, 128, torch.bfloat16, True),
    (1, 8, 80, torch.float32, False),
    (2, 4, 32, torch.float32, True),
    (1, 4, 80, torch.float16, True),
    (1, 20, 64, torch.bfloat16, False),  # more query heads than a tensor-core tile has rows
]
EXTRAS = {
    "plain": {},
    "sliding_window": {"sliding_window": 37},
    "soft_cap": {"soft_cap": 2.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 50, "soft_cap": 4.0, "sinks": True},
}


def run_both(paged, lens, queries, skips, *, group=4, extras=None, padding=0, **launch):
    """Compare Triton with the reference, by PyTorch's error in the dtype; return the output."""
    maxima = {name: launch.pop(name, None) for name in ("max_query_len", "max_seq_len")}
    batch = paged.batch(queries, lens, skips, group=group, padding=padding, **maxima)
    query, extras = batch.query, dict(extras or {})
    if extras.get("sinks"):
        sinks = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(2))
        extras["sinks"] = sinks.to(query.device)
    softmax = take_softmax(extras, query.shape[2] ** -0.5)
    assert not extras
    expected = torch.full(query.shape, -7.0, dtype=torch.float64, device=query.device)
    lse, right_lse = (torch.full(query.shape[:2], -7.0, device=query.device) for _ in range(2))
    reference.paged_attention(
        expected, batch, softmax, log_sum_exp=right_lse, compute_dtype=torch.float64
    )
    out = torch.full_like(query, -7.0)
    triton_ops.paged_attention(out, batch, softmax, log_sum_exp=lse, **launch)
    torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)
    tolerance = 2e-5 if query.dtype == torch.float32 else 2.0 * torch.finfo(query.dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_decode(make_paged, geometry, splits):
    num_kv_heads, group, head_size, dtype, joint = geometry
    lens, skips = [1, 150, 64, 97, 17], [0, 37, 48, 96, 0]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=joint, skips=skips)
    run_both(paged, lens, [1] * 5, skips, group=group, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("extra", EXTRAS)
def test_decode_extras(make_paged, extra, splits):
    lens, skips = [150, 33, 90], [37, 0, 16]
    paged = make_paged(lens, 2, 64, torch.bfloat16, block_size=8, skips=skips)
    run_both(paged, lens, [1] * 3, skips, extras=EXTRAS[extra], num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("extra", ["plain", "sinks"])
def test_a_query_that_sees_nothing_gets_zeros(make_paged, extra, splits):
    paged = make_paged([70, 40], 1, 64, torch.bfloat16)
    options = {"extras": EXTRAS[extra], "num_splits": splits}
    out = run_both(paged, [70, 40], [1, 1], [70, 0], **options)
    assert not out[0].any() and out[1].all()


@pytest.mark.parametrize("extra", ["plain", "sinks"])
def test_queries_below_the_skip_get_zeros(make_paged, extra):
    paged = make_paged([70, 40], 1, 64, torch.float32)
    out = run_both(paged, [70, 40], [6, 40], [67, 40], extras=EXTRAS[extra])
    assert not out[:3].any() and out[3:6].all() and not out[6:].any()


def test_decode_of_long_context_in_many_tiles(make_paged):
    paged = make_paged([1500, 400], 1, 128, torch.bfloat16, joint=True)
    run_both(paged, [1500, 400], [1, 1], [5, 0], num_splits=8)


def test_decode_uses_the_workspace_and_ignores_padding(make_paged, device):
    """Check that padded requests (no query, length 0) and padded tokens stay untouched."""
    paged = make_paged([70, 40, 0], 2, 64, torch.bfloat16)
    workspace = triton_ops.Workspace.allocate(8, 2, 64, device, rows=3 * 8 * 2)
    for buffer in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        buffer.fill_(float("nan"))
    options = {"workspace": workspace, "max_query_len": 1, "padding": 2}
    out = run_both(paged, [70, 40, 0], [1, 1, 0], [0, 16, 32], num_splits=2, **options)
    assert (out[2:] == -7.0).all()
    assert not workspace.partial_max[: 2 * 8 * 2].isnan().any()
    with pytest.raises(ValueError, match="48 rows of 64; 3 requests"):
        run_both(paged, [70, 40, 0], [1, 1, 0], [0, 16, 32], workspace=workspace, num_splits=4)


@pytest.mark.parametrize("geometry", GEOMETRIES[:5])
def test_prefill_and_mixed_batch(make_paged, geometry):
    """Mix a first chunk, a later chunk, a decode step, an evicted request and an empty row."""
    num_kv_heads, group, head_size, dtype, joint = geometry
    lens, queries, skips = [40, 150, 97, 60, 33], [40, 20, 1, 2, 0], [0, 0, 37, 16, 0]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=joint, skips=skips)
    run_both(paged, lens, queries, skips, group=group)


@pytest.mark.parametrize("extra", EXTRAS)
def test_prefill_extras(make_paged, extra):
    paged = make_paged([150, 33], 1, 32, torch.float32)
    run_both(paged, [150, 33], [140, 33], [0, 0], group=2, extras=EXTRAS[extra])


def attended(batch, ints):
    out = torch.empty_like(batch.query)
    triton_ops.paged_attention(out, batch, Softmax(0.125), num_splits=2)
    return out


def chosen(batch, ints):
    out = torch.full_like(batch.query, float("nan"))
    triton_ops.topn_attention(out, batch, Softmax(0.125), ints([7, 0]))
    return out


def scored(batch, ints, **known):
    return window_scores(triton_ops, batch, Softmax(0.125), **known)[:, :, :25]


def scored_again(batch, ints):
    generator = torch.Generator().manual_seed(2)
    lse = torch.randn(batch.query.shape[:2], generator=generator).to(batch.query.device)
    return scored(batch, ints, log_sum_exp=lse)


@pytest.mark.parametrize(
    ("run", "starts", "lens", "skips"),
    [
        (attended, [0, 1, 9], [40, 40], [3, 0]),
        (chosen, [0, 1, 3], [40, 40], [3, 0]),
        *((run, [0, 8, 16], [40, 33], [0, 0]) for run in (scored, scored_again)),
    ],
)
def test_blocks_beyond_32_bit_offsets(far_pools, ints, device, run, starts, lens, skips):
    """Use offsets above 2**31 elements, where a 32-bit product would wrap."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(starts[-1], 2, 64, generator=generator).bfloat16().to(device)
    numbers = ints([[2, 0, 1], [2, 1, 0]]), ints(starts), ints(lens), ints(skips)
    far, near = (
        run(AttentionBatch(query, *pool.split(64, dim=3), *numbers), ints)
        for pool in far_pools(3, 128)
    )
    assert torch.equal(far, near) and far.isfinite().all()
