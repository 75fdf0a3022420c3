# SPDX-License-Identifier: Apache-2.0
"""The mass beside the cache, and later evictions of a layer, against a walk over plain lists."""

from __future__ import annotations

import numpy as np
import torch

from tests.steps import make_call, make_context, make_evictions
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.accumulated.gather import KeyMass
from vllm_pyramid.methods.thinning.generated import MARK, GeneratedMass
from vllm_pyramid.policy import Policy, load_policy

HEADS, BLOCK, LAYERS, BLOCKS = 2, 4, 3, 400


def make_mass(policy: Policy, num_blocks: int, heads: int = HEADS) -> KeyMass:
    assert isinstance(policy.scorer, AccumulatingScorer)
    mass = KeyMass(policy, policy.scorer, make_context(1, heads=heads, block_size=BLOCK))
    mass.allocate(num_blocks)
    return mass


def test_starting_over_spares_other_peoples_blocks() -> None:
    """Of all requests that come to an eviction, shortened or not."""
    mass = make_mass(load_policy("scissorhands"), 10)
    mass.pages.fill_(1.0)
    tables = torch.tensor([[3, 7, 5], [2, 5, 9]], dtype=torch.int32)  # 5 and 9 are stale
    evictions = make_evictions([8, 3], [[6, 3]], block_size=BLOCK)
    mass.after_eviction(make_call(tables), evictions)
    zero = {block for block in range(10) if not mass.pages[block].any()}
    assert zero == {0, 3, 7, 2}  # block 0 is nobody's
    assert (mass.pages[[1, 4, 5, 6, 8, 9]] == 1.0).all()


def test_sums_that_go_on_are_left_alone() -> None:
    mass = make_mass(load_policy("h2o"), 10)
    mass.pages.fill_(1.0)
    tables = torch.tensor([[3, 7, 5]], dtype=torch.int32)
    mass.after_eviction(make_call(tables), make_evictions([8], [[6]], block_size=BLOCK))
    assert (mass.pages == 1.0).all()


def test_smallest_counts_stay_and_older_ones_of_equals() -> None:
    policy = load_policy("scissorhands", 4, {"window": 1, "fill_blocks": False})
    mass = make_mass(policy, 4, heads=1)
    mass.pages[1, 0] = torch.tensor([5.0, 1.0, 2.0, 2.0])
    mass.pages[3, 0] = torch.tensor([0.0, 2.0, 9.0, 0.0])
    evictions = make_evictions([7], plans=[policy.plan(7, 1, BLOCK).after(1)], block_size=BLOCK)
    call = make_call(torch.tensor([[1, 3]], dtype=torch.int32), ops=cpu)
    batch = evictions.batch(call, policy, np.array([0]))
    scores = mass.score(batch)
    assert scores is not None
    assert policy.selector.kept(scores, batch).tolist() == [[[1, 2, 4, 6]]]


def test_sums_of_a_prompt_that_stays_are_others_too() -> None:
    """Another request's NaN in a shared block is no score of this one; what stays is the prompt."""
    policy = load_policy(
        "h2o", 3, {"interval": 4, "schedule.prompt": "keep", "recent": 0.0, "allocator": "uniform"}
    )
    mass = make_mass(policy, 6, heads=1)
    mass.pages[[2, 4]] = torch.nan  # of the prompt's 6 tokens, and 2 of the answer's
    mass.pages[4, 0, 2:] = torch.tensor([0.5, 4.0])
    mass.pages[1, 0] = torch.tensor([3.0, 0.1, 2.0, 1.0])
    point = policy.plan(6, 1, BLOCK).after(3)
    assert point.computed == 14 and point.in_place == BLOCK
    mass.pages[3, 0, :2] = torch.tensor([0.2, 0.3])
    evictions = make_evictions([14], plans=[point], block_size=BLOCK)
    evictions.prompt_lens = np.array([6], np.int32)
    tables = torch.tensor([[2, 4, 1, 3]], dtype=torch.int32)
    cache = torch.arange(6 * BLOCK * 8.0).view(6, 1, BLOCK, 8)
    call = make_call(tables, ops=cpu, caches=(cache, cache.clone()))
    batch = evictions.batch(call, policy, np.array([0]))
    scores = mass.score(batch)
    assert scores is not None and scores.isfinite().all()
    kept = policy.selector.kept(scores, batch)
    # Whole blocks go: of 8 generated tokens 4 go, and the best 4 stay behind the prompt.
    assert kept.tolist() == [[[0, 1, 2, 3, 4, 5, 7, 8, 10, 11]]]
    batch.compact(kept)
    mass.after_compact(batch, kept)
    # The first block stays where it is; its entry goes to the place behind the head.
    places = torch.arange(8, 14)
    found = mass.pages[tables[0, places // BLOCK].long(), 0, places % BLOCK]
    assert found[2:].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert mass.pages[2].isnan().all()


def test_a_group_is_marked_once_for_all_heads() -> None:
    """The best of the leaving group by the sum over the heads, ties to the lower position."""
    args = {"schedule": "thin_generated", "gen_interval": 3, "gen_window": 6}
    policy = load_policy("pyramidinfer", None, args)
    context = make_context(1, heads=HEADS, block_size=BLOCK)
    mass, _ = policy.worker_hooks(context)
    assert isinstance(mass, GeneratedMass)
    mass.allocate(12)
    mass.pages.fill_(0.5)
    # Groups of 3, a window of 6. Request 0 ends at token 11, so its tokens 2, 3 and 4 leave.
    tables = torch.tensor([[7, 2, 9], [3, 1, 4], [5, 11, 8]], dtype=torch.int32)
    mass.pages[7, :, 2] = torch.tensor([0.9, 0.0])
    mass.pages[7, :, 3] = torch.tensor([0.2, 0.8])
    mass.pages[2, :, 0] = torch.tensor([0.6, 0.4])
    # Request 2 ends at 9: none of 0, 1 and 2 is better, one stays. Request 1: none leaves yet.
    before = mass.pages.clone()
    evictions = make_evictions([11, 6, 9], block_size=BLOCK)
    batch = evictions.batch(make_call(tables), policy, np.arange(3))
    mass.mark_group(batch, np.array([2, -1, 1], np.int32))
    right = before
    for block, row, value in (
        (7, 2, -MARK), (7, 3, MARK), (2, 0, MARK),
        (5, 0, MARK), (5, 1, -MARK), (5, 2, -MARK),
        (9, 0, 0.0), (9, 1, 0.0), (9, 2, 0.0),  # the newest of each: tokens 8 to 10,
        (3, 3, 0.0), (1, 0, 0.0), (1, 1, 0.0),  # 3 to 5,
        (11, 2, 0.0), (11, 3, 0.0), (8, 0, 0.0),  # and 6 to 8
    ):  # fmt: skip
        right[block, :, row] = value
    assert torch.equal(mass.pages, right)
    mass.pages += 1e6  # whatever comes later
    assert (mass.pages[7, :, 2:] == torch.tensor([-MARK, MARK])).all()
    assert mass.gathered(tables).sum(dim=1).isfinite().all()
