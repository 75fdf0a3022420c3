# SPDX-License-Identifier: Apache-2.0
"""`add_key_mass` and the window's scores against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.arguments import head_sinks, take_softmax
from tests.kernels.every_kernel import reference, triton_ops
from vllm_pyramid.kernels.recall import kept_mass
from vllm_pyramid.kernels.records import (
    GQA_REDUCTIONS,
    POOLINGS,
    AttentionBatch,
    Reduction,
    Softmax,
    WindowBatch,
)

# (KV heads, group, head size, dtype, joint K and V)
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16, False),
    (2, 4, 128, torch.bfloat16, True),
    (1, 8, 80, torch.float32, False),
    (1, 3, 32, torch.float16, True),
    (1, 20, 64, torch.bfloat16, False),  # more query heads than a tensor-core tile has rows
]
EXTRAS = {
    "sliding_window": {"sliding_window": 37},
    "soft_cap": {"soft_cap": 2.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 50, "soft_cap": 4.0, "sinks": True},
}
START = 0.25  # what the mass holds before: it is added to


def run_both(paged, lens, queries, skips, *, group=4, extras=None, one_pass=False, **launch):
    """Run both on pages that begin at `START`; return what was added, `[G, tokens]` per request.

    `one_pass`: Triton is given the log-sum-exp of attention.
    """
    batch = paged.batch(queries, lens, skips, group=group, seed=2)
    query, extras = batch.query, dict(extras or {})
    if extras.get("sinks"):
        sinks = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(3))
        extras["sinks"] = sinks.to(query.device)
    softmax = take_softmax(extras, query.shape[2] ** -0.5)
    expected, actual = (
        torch.full(paged.key_cache.shape[:3], START, device=query.device) for _ in range(2)
    )
    if one_pass:
        lse = torch.full(query.shape[:2], float("nan"), device=query.device)
        reference.paged_attention(torch.empty_like(query), batch, softmax, log_sum_exp=lse)
        launch = {**launch, "log_sum_exp": lse}
    reference.add_key_mass(expected, batch, softmax, **extras, compute_dtype=torch.float64)
    triton_ops.add_key_mass(actual, batch, softmax, **extras, **launch)
    if extras.get("kind") == "below_average":
        # The last bit may decide where a weight is nearly the average.
        assert ((actual - expected).abs() <= 1).all() and (actual != expected).sum() <= 2
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)
    added = []
    for r, (n, skip) in enumerate(zip(lens, skips, strict=True)):
        mass = reference.gather_tokens(actual[..., None], paged.block_table[r], skip, n)
        added.append(mass[..., 0].T - START)
    assert ((actual == START) == (expected == START)).all()
    return added


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    ("geometry", "splits"), list(zip(GEOMETRIES, [1, 4, 1, 4, 2], strict=True))
)
def test_decode(make_paged, geometry, splits, one_pass):
    num_kv_heads, group, head_size, dtype, joint = geometry
    lens, skips = [1, 150, 64, 97, 17], [0, 37, 48, 96, 0]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=joint, skips=skips)
    run_both(paged, lens, [1] * 5, skips, group=group, num_splits=splits, one_pass=one_pass)


@pytest.mark.parametrize(("geometry", "splits"), [(GEOMETRIES[1], 2), (GEOMETRIES[3], None)])
def test_chunks_and_mixed_batch(make_paged, geometry, splits):
    num_kv_heads, group, head_size, dtype, joint = geometry
    lens, skips, queries = [40, 70, 33, 20, 64], [0, 21, 0, 0, 16], [40, 9, 1, 0, 5]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=joint, skips=skips)
    added = run_both(paged, lens, queries, skips, group=group, num_splits=splits)
    assert not added[3].any() and added[0].any()


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(("extra", "splits"), list(zip(EXTRAS, [1, 2, 2, 1], strict=True)))
def test_extras(make_paged, extra, splits, one_pass):
    lens, skips, queries = [150, 33, 90, 120], [37, 0, 16, 0], [1, 1, 20, 60]
    paged = make_paged(lens, 1, 64, torch.bfloat16, block_size=8, skips=skips)
    options = {"extras": EXTRAS[extra], "num_splits": splits, "one_pass": one_pass}
    run_both(paged, lens, queries, skips, **options)


@pytest.mark.parametrize("one_pass", [False, True])
def test_queries_that_see_nothing_give_nothing(make_paged, one_pass):
    paged = make_paged([32], 2, 64, torch.bfloat16)
    (added,) = run_both(paged, [32], [4], [30], one_pass=one_pass)
    torch.testing.assert_close(added.sum().item(), 2.0 * 8, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extras", [{}, {"sliding_window": 37}], ids=str)
def test_below_average(make_paged, extras):
    lens, skips, queries = [150, 33, 90], [37, 0, 16], [1, 1, 20]
    paged = make_paged(lens, 2, 64, torch.float32)
    extras = {"kind": "below_average", **extras}
    added = run_both(paged, lens, queries, skips, extras=extras, num_splits=2)
    assert all(mass.sum() > 100 for mass in (added[0], added[2]))


@pytest.mark.parametrize(
    ("kind", "one_pass"), [("sum", False), ("below_average", False), ("below_average", True)]
)
def test_first_queries(make_paged, ints, kind, one_pass):
    lens, skips, queries = [70, 64, 33], [16, 0, 0], [40, 20, 1]
    paged = make_paged(lens, 1, 32, torch.float32, joint=True)
    extras = {"kind": kind, "first_queries": ints([55, 10, 33])}
    options = {"extras": extras, "group": 3, "num_splits": 1, "one_pass": one_pass}
    added = run_both(paged, lens, queries, skips, **options)
    assert not added[2].any() and added[0].any() and added[1].any()


@pytest.mark.parametrize("group", [4, 8])
def test_no_query_adds(make_paged, ints, group):
    """Pass the largest int32 for "no query", which groups of heads must not multiply."""
    lens, queries = [70, 33], [40, 1]
    paged = make_paged(lens, 1, 32, torch.float32, joint=True)
    extras = {"first_queries": ints([2**31 - 1, 20])}
    added = run_both(paged, lens, queries, [0, 0], group=group, extras=extras, num_splits=1)
    assert not added[0].any() and added[1].any()


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("extra", [None, "sinks", "sliding_window"])
def test_a_key_that_is_nan_reaches_the_mass_of_its_head(make_paged, device, extra, one_pass):
    """NaN tells that a request failed; queries that do not see it keep their results."""
    lens = [90, 33, 64]
    paged = make_paged(lens, 2, 64, torch.float32)
    batch = paged.batch([1, 1, 20], lens, group=4)
    query, extras = batch.query, dict(EXTRAS.get(extra, {}))
    if extra == "sinks":
        extras["sinks"] = head_sinks(8).to(device)
    softmax = take_softmax(extras, 0.125)

    def added():
        mass, lse = torch.zeros(paged.key_cache.shape[:3], device=device), None
        if one_pass:
            out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device=device)
            reference.paged_attention(out, batch, softmax, log_sum_exp=lse)
        triton_ops.add_key_mass(mass, batch, softmax, log_sum_exp=lse)
        last = [(n - 1) // 16 for n in lens]
        return [mass[paged.block_table[r, page].long()] for r, page in enumerate(last)]

    whole = added()
    for request, place in ((0, 85), (2, 50)):
        block = paged.block_table[request, place // 16].long()
        paged.key_cache[block, 0, place % 16] = math.nan
    found = added()
    assert found[0][0, :10].isnan().all() and found[2][0].isnan().all()
    assert torch.equal(found[1], whole[1])
    assert all(torch.equal(found[r][1], whole[r][1]) for r in (0, 2))


def test_strides(make_paged, device):
    """Pass a view as the mass."""
    paged = make_paged([70], 2, 64, torch.bfloat16)
    inputs = (paged.batch([1], [70]), Softmax(0.125))
    blocks, heads, rows = paged.key_cache.shape[:3]
    whole = torch.zeros(blocks, heads, rows, device=device)
    triton_ops.add_key_mass(whole, *inputs)
    wide = torch.zeros(heads + 1, blocks, rows + 3, device=device)
    view = wide.transpose(0, 1)[:, :heads, :rows]
    triton_ops.add_key_mass(view, *inputs)
    assert torch.equal(view, whole) and whole.any()
    view.zero_()
    assert not wide.any()


def test_blocks_beyond_32_bit_offsets(make_huge, far_pools, ints, device):
    """Use offsets above 2**31 elements, in cache and mass, where a 32-bit product would wrap."""
    stride, blocks = 2**28, 9
    far = make_huge(8 * stride + 4096, torch.float32).as_strided((blocks, 1, 16), (stride, 1, 1))
    near = torch.zeros(blocks, 1, 16, device=device)
    query = torch.randn(10, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    table = ints([[2, 0, 7], [6, 8, 4], [1, 5, 3]])  # a block has one request
    numbers = ints([0, 1, 9, 10]), ints([40, 40, 35]), ints([3, 0, 0])
    for pool, mass in zip(far_pools(blocks, 128, stride), (far, near), strict=True):
        mass.zero_()
        batch = AttentionBatch(query, *pool.split(64, dim=3), table, *numbers)
        triton_ops.add_key_mass(mass, batch, Softmax(0.125), num_splits=2)
    assert torch.equal(far, near)
    torch.testing.assert_close(near.sum().item(), 20.0)


@pytest.mark.parametrize("sinks", [None, head_sinks(8)], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("gqa_reduce", "pooling"), list(zip(GQA_REDUCTIONS, POOLINGS, strict=True))
)
def test_window_scores_and_recall(make_paged, ints, device, gqa_reduce, pooling, sinks):
    lens = [9, 60, 33]
    paged = make_paged(lens, 2, 64, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3 * 8, 8, 64, generator=generator).to(torch.bfloat16).to(device)
    ends = ints([8, 16, 24])
    batch = WindowBatch(query, paged.key_cache, paged.block_table, ends, ints(lens), 8, 70)
    softmax = Softmax(0.25, sinks=None if sinks is None else sinks.to(device))
    arguments = (batch, softmax, Reduction(gqa_reduce, pooling))
    expected = reference.window_scores(*arguments, compute_dtype=torch.float64)
    scores = triton_ops.window_scores(*arguments)
    longest = expected.shape[2]  # the batch says that prompts may be longer
    torch.testing.assert_close(scores[:, :, :longest], expected, rtol=2e-5, atol=2e-6)
    assert (scores[:, :, longest:] == -torch.inf).all()
    keeps = ints([9, 20, 12])
    kept = triton_ops.select(scores, ints(lens), keeps, window=8)
    recall = kept_mass(scores, kept, ints(lens), keeps, window=8)
    assert recall[0].tolist() == [1.0, 1.0]
    assert ((recall[1:] > 0) & (recall[1:] < 1)).all()
