# SPDX-License-Identifier: Apache-2.0
"""`topn_attention` on Triton against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.arguments import take_softmax
from tests.kernels.every_kernel import reference, triton_ops
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.host_values.kernels import Choosers

# (KV heads, group, head size, dtype)
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16),
    (2, 4, 128, torch.bfloat16),
    (1, 8, 80, torch.float32),
    (1, 3, 32, torch.float16),
]
LENS, QUERIES = [1, 110, 64, 57, 12, 50, 30], [1, 1, 3, 1, 12, 5, 0]
SKIPS = [0, 37, 48, 50, 0, 0, 0]
# All keys for some: 0, more than there are, a chunk of a prompt.
TOP_NS = [1, 16, 5, 7, 0, 33, 4]


def run_both(paged, ints, *, group=4, top_ns=TOP_NS, given=False, **options):
    batch = paged.batch(QUERIES, LENS, SKIPS, group=group, seed=2)
    query, device = batch.query, batch.query.device
    if options.get("sinks"):
        sinks = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(3))
        options["sinks"] = sinks.to(device)
    softmax = take_softmax(options, query.shape[2] ** -0.5)
    right = torch.empty(query.shape, dtype=torch.float64, device=device)
    rows = torch.full((len(LENS),), 5, device=device)
    reference.topn_attention(
        right, batch, softmax, ints(top_ns), **options, compute_dtype=torch.float64, value_rows=rows
    )
    out, found = torch.full_like(query, float("nan")), torch.full_like(rows, 5)
    if given:  # what the host knows
        pairs = [(1, 0), (2, 0), (2, 1), (2, 2), *((5, i) for i in range(5))]
        options |= {"choosers": Choosers(ints(pairs), 40)}
        batch = replace(batch, max_query_len=16, max_seq_len=128)
    triton_ops.topn_attention(out, batch, softmax, ints(top_ns), **options, value_rows=found)
    assert found.tolist() == rows.tolist()
    error = 2e-5 if query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), right, rtol=error, atol=error)
    return out


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_matches_reference(make_paged, ints, geometry):
    num_kv_heads, group, head_size, dtype = geometry
    paged = make_paged(LENS, num_kv_heads, head_size, dtype, skips=SKIPS)
    out = run_both(paged, ints, group=group)
    if geometry == GEOMETRIES[0]:
        assert torch.equal(run_both(paged, ints, group=group, given=True), out)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 37}, {"soft_cap": 2.5}, {"sliding_window": 50, "soft_cap": 4.0,
     "sinks": True}],
    ids=str,
)  # fmt: skip
def test_options(make_paged, ints, options, renormalize):
    paged = make_paged(LENS, 1, 64, torch.float32, joint=True)
    run_both(paged, ints, group=2, renormalize=renormalize, **options)


def test_all_keys_are_paged_attention(make_paged, ints):
    paged = make_paged(LENS, 2, 64, torch.bfloat16)
    run_both(paged, ints, top_ns=[0, 73, 999, 0, 0, 50, 30])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "soft_cap": 4.0}], ids=str)
def test_a_key_that_is_nan_reaches_its_queries(make_paged, ints, device, options, renormalize):
    """NaN tells that a request failed; queries that do not see it keep their results."""
    paged = make_paged(LENS, 2, 64, torch.float32)
    sinks = torch.linspace(0, 2, 4, device=device) if options else None
    softmax = take_softmax({**options, "sinks": sinks}, 0.125)
    batch = paged.batch(QUERIES, LENS, SKIPS, group=2)

    def attended(ops):
        out = torch.empty_like(batch.query)
        ops.topn_attention(out, batch, softmax, ints(TOP_NS), renormalize=renormalize)
        return out

    whole = attended(triton_ops)
    for request, place in ((1, 60), (5, 47)):
        block = paged.block_table[request, place // 16].long()
        paged.key_cache[block, 0, place % 16] = math.nan
    found, wrong = attended(triton_ops), attended(reference).isnan()
    assert wrong[1, :2].all() and wrong[20:23, :2].all() and wrong.sum() == 4 * 2 * 64
    assert torch.equal(found.isnan(), wrong) and torch.equal(found[~wrong], whole[~wrong])


def test_ties_go_to_the_lower_position(make_paged, ints, device):
    paged = make_paged([40], 1, 32, torch.float32)
    places = torch.arange(40, device=device)
    ids, rows = paged.block_table[0, places // 16].long(), places % 16
    paged.key_cache[ids, :, rows] = 0.0
    paged.value_cache[ids, :, rows] = places.float()[:, None, None].expand(-1, 1, 32)
    batch = paged.batch([1], [40], group=2)
    out = torch.empty_like(batch.query)
    triton_ops.topn_attention(out, batch, Softmax(0.2), ints([5]), renormalize=True)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


def test_only_the_chosen_rows_of_v_are_read(make_paged, ints):
    """Poison everything else in V, which exact attention must not read either."""
    paged = make_paged([90], 2, 32, torch.float32)
    batch = replace(paged.batch([1], [90], group=2), value_cache=paged.value_cache.clone())
    query = batch.query
    right, out = torch.empty_like(query), torch.empty_like(query)
    triton_ops.topn_attention(right, batch, Softmax(0.2), ints([4]))
    k = reference.gather_tokens(paged.key_cache, paged.block_table[0], 0, 90)
    poisoned = torch.full_like(paged.value_cache, float("nan"))
    for head in range(4):
        best = (k[:, head // 2] @ query[0, head]).argsort(descending=True)[:4]
        blocks, places = paged.block_table[0, best // 16].long(), best % 16
        poisoned[blocks, head // 2, places] = paged.value_cache[blocks, head // 2, places]
    triton_ops.topn_attention(out, replace(batch, value_cache=poisoned), Softmax(0.2), ints([4]))
    assert torch.equal(out, right)
