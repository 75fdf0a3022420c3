# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` against the reference in float64: decode, prefill, mixed batches."""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.arguments import take_softmax
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton import functions as triton_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.cpu if INTERPRETED else pytest.mark.gpu

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


def run_both(
    paged,
    ints,
    geometry,
    lens,
    queries,
    skips,
    *,
    extras=None,
    seed=1,
    padding=0,
    nothing=0,
    **launch,
):
    """Return the outputs of Triton and of the reference, and the tolerance."""
    num_kv_heads, group, head_size, dtype, _ = geometry
    device = paged.key_cache.device
    generator = torch.Generator().manual_seed(seed)
    num_heads = num_kv_heads * group
    extras = dict(extras or {})
    if extras.get("sinks"):
        extras["sinks"] = torch.randn(num_heads, generator=generator).to(device)
    query = torch.randn(sum(queries) + padding, num_heads, head_size, generator=generator)
    query = query.to(dtype).to(device)
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    maxima = {name: launch.pop(name, None) for name in ("max_query_len", "max_seq_len")}
    batch = paged.attention(query, ints(starts), ints(lens), ints(skips), **maxima)
    softmax = take_softmax(extras, head_size**-0.5)
    assert not extras
    expected = torch.full(query.shape, -7.0, dtype=torch.float64, device=device)
    lse, right_lse = (torch.full(query.shape[:2], -7.0, device=device) for _ in range(2))
    reference.paged_attention(
        expected, batch, softmax, log_sum_exp=right_lse, compute_dtype=torch.float64
    )
    out = torch.full_like(query, -7.0)
    triton_ops.paged_attention(out, batch, softmax, log_sum_exp=lse, **launch)
    torch.testing.assert_close(lse, right_lse, rtol=2e-5, atol=2e-5)
    tolerance = 2e-5 if dtype == torch.float32 else 2.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_decode(make_paged, ints, geometry, splits):
    num_kv_heads, _, head_size, dtype, joint = geometry
    lens, skips = [1, 150, 64, 97, 17], [0, 37, 48, 96, 0]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=joint)
    for r, skip in enumerate(skips):
        paged.hide(r, skip // 16)
    run_both(paged, ints, geometry, lens, [1] * 5, skips, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("extra", EXTRAS)
def test_decode_extras(make_paged, ints, extra, splits):
    geometry = (2, 4, 64, torch.bfloat16, False)
    lens, skips = [150, 33, 90], [37, 0, 16]
    paged = make_paged(lens, 2, 64, torch.bfloat16, block_size=8)
    for r, skip in enumerate(skips):
        paged.hide(r, skip // 8)
    run_both(paged, ints, geometry, lens, [1] * 3, skips, extras=EXTRAS[extra], num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("extra", ["plain", "sinks"])
def test_a_query_that_sees_nothing_gets_zeros(make_paged, ints, extra, splits):
    paged = make_paged([70, 40], 1, 64, torch.bfloat16)
    geometry = (1, 4, 64, torch.bfloat16, False)
    options = {"extras": EXTRAS[extra], "num_splits": splits}
    out = run_both(paged, ints, geometry, [70, 40], [1, 1], [70, 0], **options)
    assert not out[0].any() and out[1].all()


@pytest.mark.parametrize("extra", ["plain", "sinks"])
def test_queries_below_the_skip_get_zeros(make_paged, ints, extra):
    paged = make_paged([70, 40], 1, 64, torch.float32)
    geometry = (1, 4, 64, torch.float32, False)
    out = run_both(paged, ints, geometry, [70, 40], [6, 40], [67, 40], extras=EXTRAS[extra])
    assert not out[:3].any() and out[3:6].all() and not out[6:].any()


def test_decode_of_long_context_in_many_tiles(make_paged, ints):
    geometry = (1, 4, 128, torch.bfloat16, True)
    paged = make_paged([1500, 400], 1, 128, torch.bfloat16, joint=True)
    run_both(paged, ints, geometry, [1500, 400], [1, 1], [5, 0], num_splits=8)


def test_decode_uses_the_workspace_and_ignores_padding(make_paged, ints, device):
    """Check that padded requests (no query, length 0) and padded tokens stay untouched."""
    geometry = (2, 4, 64, torch.bfloat16, False)
    paged = make_paged([70, 40, 0], 2, 64, torch.bfloat16)
    workspace = triton_ops.Workspace.allocate(8, 2, 64, device, rows=3 * 8 * 2)
    for buffer in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        buffer.fill_(float("nan"))
    out = run_both(
        paged,
        ints,
        geometry,
        [70, 40, 0],
        [1, 1, 0],
        [0, 16, 32],
        padding=2,
        workspace=workspace,
        num_splits=2,
        max_query_len=1,
    )
    assert (out[2:] == -7.0).all()
    assert not workspace.partial_max[: 2 * 8 * 2].isnan().any()
    with pytest.raises(ValueError, match="48 rows of 64; 3 requests"):
        run_both(
            paged,
            ints,
            geometry,
            [70, 40, 0],
            [1, 1, 0],
            [0, 16, 32],
            workspace=workspace,
            num_splits=4,
        )


@pytest.mark.parametrize("geometry", GEOMETRIES[:5])
def test_prefill_and_mixed_batch(make_paged, ints, geometry):
    """Mix a first chunk, a later chunk, a decode step, an evicted request and an empty row."""
    num_kv_heads, _, head_size, dtype, joint = geometry
    lens, queries, skips = [40, 150, 97, 60, 33], [40, 20, 1, 2, 0], [0, 0, 37, 16, 0]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=joint)
    for r, skip in enumerate(skips):
        paged.hide(r, skip // 16)
    run_both(paged, ints, geometry, lens, queries, skips)


@pytest.mark.parametrize("extra", EXTRAS)
def test_prefill_extras(make_paged, ints, extra):
    geometry = (1, 2, 32, torch.float32, False)
    paged = make_paged([150, 33], 1, 32, torch.float32)
    run_both(paged, ints, geometry, [150, 33], [140, 33], [0, 0], extras=EXTRAS[extra])


def test_blocks_beyond_32_bit_offsets(make_huge, ints, device):
    """Use offsets above 2**31 elements, where a 32-bit product would wrap."""
    block_stride, head_size = 2**30, 64
    flat = make_huge(2 * block_stride + 4096, torch.bfloat16)
    cache = flat.as_strided((3, 1, 16, 2 * head_size), (block_stride, 1, 2 * head_size, 1))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3, 1, 16, 2 * head_size, generator=generator).bfloat16().to(device)
    query = torch.randn(9, 2, head_size, generator=generator).bfloat16().to(device)
    table = ints([[2, 0, 1], [2, 1, 0]])
    outs = []
    for pool in (cache, data):
        pool.copy_(data)
        out = torch.empty_like(query)
        batch = AttentionBatch(
            query,
            pool[..., :head_size],
            pool[..., head_size:],
            table,
            ints([0, 1, 9]),
            ints([40, 40]),
            ints([3, 0]),
        )
        triton_ops.paged_attention(out, batch, Softmax(0.125), num_splits=2)
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
