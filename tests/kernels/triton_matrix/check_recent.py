# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` on Triton against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.arguments import WHERE, take_softmax
from tests.kernels.every_kernel import reference, triton_ops
from vllm_pyramid.methods.thinning.kernels import RecentBatch

pytestmark = WHERE

# (KV heads, group, head size, dtype)
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16),
    (2, 4, 128, torch.bfloat16),
    (1, 8, 80, torch.float32),
    (1, 3, 32, torch.float16),
]
LENS, QUERIES, SKIPS = [9, 41, 130, 100], [9, 30, 90, 20], [0, 3, 16, 37]
RECENTS, CONTEXTS = [1, 6, 33, 20], [8, 24, 57, 43]


def recent_of(batch, ints, rows=slice(None), **options):
    """The requests of a batch, whose last queries score what came before them."""
    ends = batch.query_start_loc[1:][rows]
    return RecentBatch(
        *(batch.query, batch.key_cache, batch.block_table[rows], ends, batch.seq_lens[rows]),
        *(batch.skips[rows], ints(RECENTS[rows]), ints(CONTEXTS[rows])),
        **options,
    )


def check(paged, ints, group, **options):
    batch = paged.batch(QUERIES, LENS, SKIPS, group=group, seed=2)
    query, device = batch.query, batch.query.device
    if options.get("sinks"):
        sinks = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(3))
        options["sinks"] = sinks.to(device)
    how = {"distance_weight": options.pop("distance_weight", 1.2)}
    softmax = take_softmax(options, query.shape[2] ** -0.5)
    lse = torch.full(query.shape[:2], math.nan, device=device)
    reference.paged_attention(torch.empty_like(query), batch, softmax, log_sum_exp=lse)
    recent = recent_of(batch, ints, **options)
    right = reference.recent_mass(recent, softmax, **how, compute_dtype=torch.float64)
    for known in (None, lse):
        found = triton_ops.recent_mass(recent, softmax, **how, log_sum_exp=known)
        torch.testing.assert_close(found, right, rtol=5e-4, atol=1e-6)
        for r, context in enumerate(CONTEXTS):
            assert not found[r, :, context:].any() and found[r, :, :context].all()
    if softmax.sinks is None:
        lse += math.log(2)  # it is used
        half = triton_ops.recent_mass(recent, softmax, **how, log_sum_exp=lse)
        torch.testing.assert_close(half * 2, right, rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_matches_reference(make_paged, ints, geometry):
    num_kv_heads, group, head_size, dtype = geometry
    paged = make_paged(LENS, num_kv_heads, head_size, dtype, skips=SKIPS)
    check(paged, ints, group)


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 2.5},
        {"sinks": True},
        {"sinks": True, "soft_cap": 2.0, "distance_weight": 0.5},
        {"distance_weight": 3.0, "max_context": 80},
    ],
    ids=str,
)
def test_options(make_paged, ints, options):
    paged = make_paged(LENS, 2, 64, torch.float32, joint=True)
    check(paged, ints, 3, **options)


def test_a_row_does_not_depend_on_the_batch(make_paged, ints):
    """Thin requests alone and together: the same numbers, bit for bit."""
    batch = make_paged(LENS, 2, 64, torch.bfloat16).batch(QUERIES, LENS, SKIPS, group=2, seed=3)

    def mass(recent):
        return triton_ops.recent_mass(recent, take_softmax({}, 0.125), distance_weight=1.2)

    together = mass(recent_of(batch, ints, max_context=57))
    for r in range(len(LENS)):
        found = mass(recent_of(batch, ints, slice(r, r + 1)))
        assert torch.equal(found[0], together[r, :, : CONTEXTS[r]])
