# SPDX-License-Identifier: Apache-2.0
"""The mass beside the cache, and later evictions of a layer, against a walk over plain lists."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.steps import make_call, make_context, make_evictions, make_tracker, the_hooks
from vllm_pyramid.attention.evict import evict_layer
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.accumulated.gather import KeyMass
from vllm_pyramid.methods.thinning.generated import MARK, GeneratedMass
from vllm_pyramid.plan import EvictionPoint, IntArray
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.schedules import IntervalSchedule
from vllm_pyramid.step.attention_inputs import CacheWrite

pytestmark = pytest.mark.cpu

HEADS, BLOCK, LAYERS, BLOCKS = 2, 4, 3, 400
PROMPTS = {"a": 37, "b": 9, "c": 58}
WIDTH = 64


class Protecting(IntervalSchedule):
    """Every layer another length, and what the prompt left is never touched again."""

    kind: str = "test"  # type: ignore[assignment]

    def keep(self, prompt: EvictionPoint, computed: int, thinned: EvictionPoint) -> IntArray:
        groups = (computed - prompt.computed) // self.interval
        return prompt.keep + groups * np.array([4, 3, 1], np.int32)

    def front(self, prompt: EvictionPoint, computed: int) -> IntArray:
        return self.keep(prompt, computed - self.interval, prompt)


class Walk:
    """One layer a list a KV head: `[(position, mass)]`, beside the real pages.

    Keys and values hold the position, so what the cache holds can be read back.
    """

    def __init__(self, policy: Policy, ops: Ops) -> None:
        self.policy, self.ops = policy, ops
        self.tracker = make_tracker(policy, LAYERS, BLOCK, len(PROMPTS) + 1, heads=HEADS)
        self.random = random.Random(5)
        order = self.random.sample(range(1, BLOCKS), BLOCKS - 1)
        self.tables = torch.zeros(LAYERS, len(PROMPTS), WIDTH, dtype=torch.int32)
        for layer in range(LAYERS):
            for row in range(len(PROMPTS)):
                for entry in range(30):
                    self.tables[layer, row, entry] = order.pop()
        self.cache = torch.full((BLOCKS, HEADS, 2 * BLOCK, 8), -1.0)
        self.mass: KeyMass | None = None
        if isinstance(policy.scorer, AccumulatingScorer):
            self.mass = the_hooks(self.tracker, KeyMass)
            self.mass.allocate(BLOCKS)
            self.mass.pages.fill_(77.0)  # of owners before
        self.held: dict[tuple[int, str, int], list[tuple[int, float]]] = {
            (layer, name, head): []
            for layer in range(LAYERS)
            for name in PROMPTS
            for head in range(HEADS)
        }
        self.computed = dict.fromkeys(PROMPTS, 0)
        self.evictions = 0

    def step(self, scheduled: dict[str, int]) -> None:
        names = list(scheduled)
        self.random.shuffle(names)
        columns = [
            np.array([source[name] for name in names], np.int32)
            for source in (PROMPTS, self.computed, scheduled)
        ]
        for name in names:
            if name not in self.tracker._requests:
                self.tracker.add(name, PROMPTS[name], None)
        step = self.tracker.begin_step(names, *columns)
        for layer in range(LAYERS):
            rows = [list(PROMPTS).index(name) for name in names]
            table = self.tables[layer, rows]
            for row, name in enumerate(names):
                self.attend(layer, name, table[row], scheduled[name])
                skip = int(step.skips[layer, row])
                assert (
                    len(self.held[layer, name, 0]) == self.computed[name] + scheduled[name] - skip
                )
            if step.evictions is not None:
                call = make_call(
                    table,
                    layer=layer,
                    ops=self.ops,
                    query=torch.zeros(1, HEADS, 8),
                    caches=(self.cache[:, :, :BLOCK], self.cache[:, :, BLOCK:]),
                )
                evict_layer(self.policy, call, step.evictions, self.tracker.hooks)
                for index, name in enumerate(step.evictions.request_ids):
                    plan = step.evictions.plans[index]
                    assert isinstance(plan, EvictionPoint)
                    self.evict(layer, name, plan)
                    self.evictions += 1
        for name in names:
            self.computed[name] += scheduled[name]
        self.tracker.end_step()

    def attend(self, layer: int, name: str, table: torch.Tensor, count: int) -> None:
        """New tokens are written, and everything that is held is given something."""
        start = self.computed[name]
        positions = torch.arange(start, start + count)
        slots = table[positions // BLOCK].long() * BLOCK + positions % BLOCK
        values = positions[:, None, None].float().expand(-1, HEADS, 8).contiguous()
        self.ops.reshape_and_cache(
            values, values + 0.5, self.cache[:, :, :BLOCK], self.cache[:, :, BLOCK:], slots
        )
        if self.mass is not None:
            padded = torch.cat([slots, torch.tensor([-1])])
            caches = self.cache[:, :, :BLOCK], self.cache[:, :, BLOCK:]
            self.mass.after_write(
                CacheWrite(self.ops, layer, values, values + 0.5, *caches, padded)
            )
        end = start + count
        for head in range(HEADS):
            held = self.held[layer, name, head]
            held += [(position, 0.0) for position in range(start, end)]
            for index, (position, mass) in enumerate(held):
                given = self.random.randrange(64) / 64  # exact in float32
                held[index] = (position, mass + given)
                if self.mass is not None:
                    place = end - len(held) + index
                    self.mass.pages[table[place // BLOCK], head, place % BLOCK] += given

    def evict(self, layer: int, name: str, plan: EvictionPoint) -> None:
        keep, front, recent = (int(n[layer]) for n in (plan.held, plan.front, plan.recent))
        for head in range(HEADS):
            held = self.held[layer, name, head]
            sign = self.mass.scorer.sign if self.mass is not None else None
            places = list(range(len(held)))
            late = min(recent, keep)
            certain = set(places[len(held) - late :]) | set(places[: min(front, keep - late)])
            others = [place for place in places if place not in certain]
            if sign is None:
                others.sort(reverse=True)
            else:
                others.sort(key=lambda place: (-sign * held[place][1], place))
            chosen = sorted(certain | set(others[: keep - len(certain)]))
            held = [held[place] for place in chosen]
            self.held[layer, name, head] = held

    def check(self) -> None:
        """The pages hold what the lists say, at the tail of what has been computed."""
        for (layer, name, head), held in self.held.items():
            end = self.computed[name]
            table = self.tables[layer, list(PROMPTS).index(name)]
            places = torch.arange(end - len(held), end)
            blocks, rows = table[places // BLOCK].long(), places % BLOCK
            positions = torch.tensor([float(position) for position, _ in held])
            for offset, shift in ((0, 0.0), (BLOCK, 0.5)):
                found = self.cache[blocks, head, rows + offset]
                assert torch.equal(found, (positions + shift)[:, None].expand(-1, 8))
            if self.mass is not None:
                found = self.mass.pages[blocks, head, rows]
                assert found.tolist() == [mass for _, mass in held]


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize(
    ("policy", "args"),
    [
        ("h2o", {"interval": 8}),
        ("h2o", {"interval": 3, "fill_blocks": False, "allocator": "arithmetic"}),
        ("h2o", {"interval": 5, "recent": 0.0, "sinks": 3, "window": 2}),
        ("h2o", {"schedule": f"{__name__}:Protecting", "schedule.interval": 6}),
        ("h2o", {"interval": 8, "allocator": "arithmetic", "beta": 100}),  # the top keeps nothing
        ("streaming-llm", {"schedule": "interval", "interval": 8}),
        ("streaming-llm", {"schedule": f"{__name__}:Protecting", "schedule.interval": 6}),
        ("streaming-llm", {"schedule": "interval", "interval": 3, "fill_blocks": False}),
    ],
    ids=str,
)
def test_evictions_against_lists(ops: Ops, policy: str, args: dict[str, Any]) -> None:
    walk = Walk(load_policy(policy, 14, args), ops)
    walk.step({"a": 20, "b": 9})
    walk.step({"a": 17, "c": 40})
    walk.step({"a": 1, "b": 1, "c": 18})
    walk.check()
    for count in range(40):
        walk.step(dict.fromkeys(("abc", "ac", "b", "cb")[count % 4], 1))
        walk.check()
    assert walk.evictions >= 3 * LAYERS * 3


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
