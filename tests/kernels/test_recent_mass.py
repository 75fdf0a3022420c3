# SPDX-License-Identifier: Apache-2.0
"""`recent_mass` of the C++ kernels against the reference in float64, and that against a loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.arguments import head_sinks, take_softmax
from tests.kernels.every_kernel import cpu, reference
from vllm_pyramid.methods.thinning.kernels import RecentBatch

LENS = [9, 41, 300, 700]
QUERY_LENS = [9, 30, 250, 500]
RECENTS = [1, 6, 64, 137]
CONTEXTS = [8, 24, 180, 363]


def mass_of(
    module: Any, batch: Any, recents: list[int], contexts: list[int], **options: Any
) -> Any:
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    recent = RecentBatch(
        batch.query,
        batch.key_cache,
        batch.block_table,
        batch.query_start_loc[1:].clone(),
        batch.seq_lens,
        batch.skips,
        torch.tensor(recents, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        options.pop("max_context", None),
    )
    return module.recent_mass(recent, softmax, **{"distance_weight": 1.2, **options})


def assert_equal(
    each_isa: Any, batch: Any, recents: list[int], contexts: list[int], **o: Any
) -> None:
    """Check on every instruction set, with and without attention's log-sum-exp."""
    right = mass_of(reference, batch, recents, contexts, compute_dtype=torch.float64, **o)
    lse, out = torch.full(batch.query.shape[:2], math.nan), torch.empty_like(batch.query)
    softmax = take_softmax({**o}, batch.query.shape[2] ** -0.5)
    for isa in each_isa():
        cpu.paged_attention(out, batch.attention(), softmax, log_sum_exp=lse)
        for given in (None, lse):
            found = mass_of(cpu, batch, recents, contexts, **o, log_sum_exp=given)
            torch.testing.assert_close(
                found, right, rtol=2e-4, atol=1e-7, msg=lambda text, isa=isa: f"{isa}: {text}"
            )
            for r, context in enumerate(contexts):
                assert not found[r, :, context:].any()
    reference.paged_attention(out, batch.attention(), softmax, log_sum_exp=lse)
    found = mass_of(reference, batch, recents, contexts, **o, log_sum_exp=lse)
    torch.testing.assert_close(found, right, rtol=2e-4, atol=1e-7)
    if softmax.sinks is not None:
        return
    lse += math.log(2)  # it is used
    for module in (cpu, reference):
        found = mass_of(module, batch, recents, contexts, **o, log_sum_exp=lse)
        torch.testing.assert_close(found * 2, right, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("sinks", [None, head_sinks(6)], ids=["plain", "sinks"])
def test_reference_is_the_paper(make_batch, sinks) -> None:
    """Compute each query and head from the definition; a sink is one more key."""
    batch = make_batch([37], [30], skips=[3], group=3)
    recent, context = 7, 20
    options = {"sinks": sinks, "compute_dtype": torch.float64}
    found = mass_of(reference, batch, [recent], [context], **options)[0]
    keys = reference.gather_tokens(batch.key_cache, batch.block_table[0], 3, 37).double()
    weights = [1 + 0.2 * i / (recent - 1) for i in range(recent)]
    for kv_head in range(2):
        expected = torch.zeros(37, dtype=torch.float64)
        for head in range(kv_head * 3, kv_head * 3 + 3):
            for i, weight in enumerate(weights):
                position = 37 - recent + i
                query = batch.query[30 - recent + i, head].double()
                logits = keys[: position + 1 - 3, kv_head] @ query / math.sqrt(64)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1].double()])
                probabilities = logits.softmax(0)[: position + 1 - 3]
                expected[3 : position + 1] += weight / sum(weights) * probabilities
        assert torch.allclose(found[kv_head].double(), expected[10:30], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "head_size"), [(1, 40), (4, 64), (7, 128), (2, 256), (3, 512)])
def test_matches_reference(make_batch, each_isa, dtype, group, head_size) -> None:
    batch = make_batch(LENS, QUERY_LENS, dtype=dtype, group=group, head_size=head_size, seed=group)
    assert_equal(each_isa, batch, RECENTS, CONTEXTS)


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 2.0},
        {"distance_weight": 0.5},
        {"sinks": True},
        {"sinks": True, "soft_cap": 2.0},
    ],
    ids=str,
)
def test_options(make_batch, each_isa, options) -> None:
    batch = make_batch(LENS, QUERY_LENS, dtype=torch.bfloat16, group=3, layout="rows")
    if "sinks" in options:
        options = options | {"sinks": head_sinks(6, torch.bfloat16)}
    assert_equal(each_isa, batch, RECENTS, CONTEXTS, **options)


def test_sinks_are_the_heads_own(make_batch) -> None:
    """Check that leaving out or reordering the sinks changes the result."""
    batch = make_batch(LENS, QUERY_LENS, group=3)
    sinks = head_sinks(6)
    found, turned, plain = (
        mass_of(cpu, batch, RECENTS, CONTEXTS, sinks=some)[2, :, :180]
        for some in (sinks, sinks.flip(0).contiguous(), None)
    )
    assert (found < 0.9 * plain).all() and ((found - turned).abs() > 0.1 * found).any()
    with pytest.raises(ValueError, match=r"sinks must be contiguous \[6\], got \(2,\)"):
        mass_of(cpu, batch, RECENTS, CONTEXTS, sinks=torch.zeros(2))


@pytest.mark.parametrize("block_size", [8, 16, 48])
def test_pieces_before_the_context(make_batch, each_isa, block_size) -> None:
    """Count keys of earlier pieces in the softmax; stale entries below `skips` are not read."""
    batch = make_batch(
        [300, 95, 700], [90, 20, 400], skips=[131, 5, 40], block_size=block_size, seed=3
    )
    assert_equal(each_isa, batch, [18, 20, 80], [72, 0, 320])


def test_sums_and_threads(make_batch, two_threads) -> None:
    """Use one recent query, whose own key holds the rest to 1; threads do not change the bits."""
    batch = make_batch([400, 130], [400, 130], group=2)
    mass = mass_of(cpu, batch, [1, 1], [399, 129])
    assert ((mass.sum(-1) < 2) & (mass.sum(-1) > 1.5)).all()  # two query heads a KV head
    many = mass_of(cpu, batch, [80, 26], [320, 104])
    torch.set_num_threads(1)
    assert torch.equal(many, mass_of(cpu, batch, [80, 26], [320, 104]))
