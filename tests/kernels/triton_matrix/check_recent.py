# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` on Triton against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.arguments import take_softmax
from tests.kernels.every_kernel import reference, triton_ops
from tests.kernels.readers import recents_of

# (KV heads, group, head size, dtype)
GEOMETRIES = [
    (2, 1, 64, torch.bfloat16),
    (2, 4, 128, torch.bfloat16),
    (1, 8, 80, torch.float32),
    (1, 3, 32, torch.float16),
]
LENS, QUERIES, SKIPS = [9, 41, 130, 100], [9, 30, 90, 20], [0, 3, 16, 37]


def check(paged, group, **options):
    batch = paged.batch(QUERIES, LENS, SKIPS, group=group, seed=2)
    query, device = batch.query, batch.query.device
    if options.get("sinks"):
        sinks = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(3))
        options["sinks"] = sinks.to(device)
    how = {"distance_weight": options.pop("distance_weight", 1.2)}
    softmax = take_softmax(options, query.shape[2] ** -0.5)
    lse = torch.full(query.shape[:2], math.nan, device=device)
    reference.paged_attention(torch.empty_like(query), batch, softmax, log_sum_exp=lse)
    recent = recents_of(batch, options.pop("max_context", None))
    assert not options
    right = reference.recent_mass(recent, softmax, **how, compute_dtype=torch.float64)
    for known in (None, lse):
        found = triton_ops.recent_mass(recent, softmax, **how, log_sum_exp=known)
        torch.testing.assert_close(found, right, rtol=5e-4, atol=1e-6)
        for r, context in enumerate(recent.contexts.tolist()):
            assert not found[r, :, context:].any() and found[r, :, :context].all()
    if softmax.sinks is None:
        lse += math.log(2)  # it is used
        half = triton_ops.recent_mass(recent, softmax, **how, log_sum_exp=lse)
        torch.testing.assert_close(half * 2, right, rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_matches_reference(make_paged, geometry):
    num_kv_heads, group, head_size, dtype = geometry
    paged = make_paged(LENS, num_kv_heads, head_size, dtype, skips=SKIPS)
    check(paged, group)


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
def test_options(make_paged, options):
    paged = make_paged(LENS, 2, 64, torch.float32, joint=True)
    check(paged, 3, **options)


def test_a_row_does_not_depend_on_the_batch(make_paged):
    """Thin requests alone and together: the same numbers, bit for bit."""
    batch = make_paged(LENS, 2, 64, torch.bfloat16).batch(QUERIES, LENS, SKIPS, group=2, seed=3)
    both = recents_of(batch, 72)

    def mass(recent):
        return triton_ops.recent_mass(recent, take_softmax({}, 0.125), distance_weight=1.2)

    names = ("block_table", "query_ends", "seq_lens", "skips", "recents", "contexts")
    for r, context in enumerate(both.contexts.tolist()):
        own = {name: getattr(both, name)[r : r + 1] for name in names}
        found = mass(replace(both, **own, max_context=None))
        assert torch.equal(found[0], mass(both)[r, :, :context])
