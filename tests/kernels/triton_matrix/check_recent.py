# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` on Triton against the reference in float64."""

from __future__ import annotations

import math
import os

import pytest
import torch

from tests.kernels.arguments import take_softmax
from tests.kernels.every_kernel import reference, triton_ops
from vllm_pyramid.methods.thinning.kernels import RecentBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.cpu if INTERPRETED else pytest.mark.gpu

# (KV heads, group, head size, dtype)
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16),
    (2, 4, 128, torch.bfloat16),
    (1, 8, 80, torch.float32),
    (1, 3, 32, torch.float16),
]
LENS, QUERIES, SKIPS = [9, 41, 130, 100], [9, 30, 90, 20], [0, 3, 16, 37]
RECENTS, CONTEXTS = [1, 6, 33, 20], [8, 24, 57, 43]


def check(paged, ints, geometry, **options):
    num_kv_heads, group, head_size, dtype = geometry
    device = paged.key_cache.device
    generator = torch.Generator().manual_seed(2)
    if options.get("sinks"):
        options["sinks"] = torch.randn(num_kv_heads * group, generator=generator).to(device)
    query = torch.randn(sum(QUERIES), num_kv_heads * group, head_size, generator=generator)
    query = query.to(dtype).to(device)
    starts = [sum(QUERIES[:i]) for i in range(len(QUERIES) + 1)]
    weight = options.pop("distance_weight", 1.2)
    softmax = take_softmax(options, head_size**-0.5)
    batch = paged.attention(query, ints(starts), ints(LENS), ints(SKIPS))
    lse = torch.full(query.shape[:2], math.nan, device=device)
    reference.paged_attention(torch.empty_like(query), batch, softmax, log_sum_exp=lse)
    recent = RecentBatch(
        *(query, paged.key_cache, paged.block_table, ints(starts[1:])),
        *(ints(LENS), ints(SKIPS), ints(RECENTS), ints(CONTEXTS)),
        max_context=options.pop("max_context", None),
    )
    right = reference.recent_mass(
        recent, softmax, distance_weight=weight, compute_dtype=torch.float64
    )
    for known in (None, lse):
        found = triton_ops.recent_mass(recent, softmax, distance_weight=weight, log_sum_exp=known)
        torch.testing.assert_close(found, right, rtol=5e-4, atol=1e-6)
        for r, context in enumerate(CONTEXTS):
            assert not found[r, :, context:].any() and found[r, :, :context].all()
    if softmax.sinks is None:
        lse += math.log(2)  # it is used
        half = triton_ops.recent_mass(recent, softmax, distance_weight=weight, log_sum_exp=lse)
        torch.testing.assert_close(half * 2, right, rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_matches_reference(make_paged, ints, geometry):
    num_kv_heads, _, head_size, dtype = geometry
    paged = make_paged(LENS, num_kv_heads, head_size, dtype)
    for r, skip in enumerate(SKIPS):
        paged.hide(r, skip // 16)
    check(paged, ints, geometry)


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
    check(paged, ints, (2, 3, 64, torch.float32), **options)


def test_a_row_does_not_depend_on_the_batch(make_paged, ints, device):
    """Thin requests alone and together: the same numbers, bit for bit."""
    paged = make_paged(LENS, 2, 64, torch.bfloat16)
    query = torch.randn(sum(QUERIES), 4, 64, generator=torch.Generator().manual_seed(3))
    query = query.to(torch.bfloat16).to(device)
    ends = ints([sum(QUERIES[: i + 1]) for i in range(len(QUERIES))])
    of_all = (ends, ints(LENS), ints(SKIPS), ints(RECENTS), ints(CONTEXTS))
    softmax = take_softmax({}, 0.125)
    together = triton_ops.recent_mass(
        RecentBatch(query, paged.key_cache, paged.block_table, *of_all, max_context=57),
        softmax,
        distance_weight=1.2,
    )
    for r in range(len(LENS)):
        alone = RecentBatch(
            query, paged.key_cache, paged.block_table[r : r + 1], *(x[r : r + 1] for x in of_all)
        )
        found = triton_ops.recent_mass(alone, softmax, distance_weight=1.2)
        assert torch.equal(found[0], together[r, :, : CONTEXTS[r]])
