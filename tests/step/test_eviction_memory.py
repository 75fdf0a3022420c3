# SPDX-License-Identifier: Apache-2.0
"""What evictions take in addition to the cache: bounded, and no more than is reserved."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import JITFunction

from tests.methods.views import MadeUp, cos_sin, ready
from tests.plumbing.peak_memory import peak_memory
from tests.steps import make_call, make_evictions, make_tracker
from vllm_pyramid.attention.evict import evict_layer
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.triton import functions as triton_ops
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.plan import EvictionPoint
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.presets import load_presets
from vllm_pyramid.step import eviction_memory
from vllm_pyramid.step.eviction_memory import (
    SCORES_BYTES,
    EvictionMemory,
    heads_at_once,
    parts_of_heads,
    pieces,
)
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.scorer_inputs import ScorerInputs

BLOCK, KV_HEADS, HEADS, SIZE = 16, 2, 4, 16


# Pieces of a step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lens", "heads"),
    [
        ([32_768] + [64] * 255, 8),
        ([64] * 100 + [32_768] + [64] * 155, 8),
        ([131_072] * 3 + [1000] * 300, 8),
        (list(range(1, 4000)), 5),
    ],
)
def test_scores_of_a_piece_are_bounded(lens: list[int], heads: int) -> None:
    """Also where one long request would pad many short ones; each request is in one piece."""
    array = np.array(lens, np.int32)
    assert 4 * heads * len(lens) * max(lens) > SCORES_BYTES, "one piece would do"
    found = pieces(array, heads)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lens)))
    assert all(4 * heads * len(piece) * int(array[piece].max()) <= SCORES_BYTES for piece in found)
    # The padding costs few pieces: twice as many as the scores fill, and one more, at most.
    assert len(found) <= 1 + 2 * -(-4 * heads * sum(lens) // SCORES_BYTES)


def test_a_request_beyond_the_bound_is_evicted_alone() -> None:
    found = pieces(np.array([10, 1 << 20, 20, 1 << 20], np.int32), 8)
    assert [piece.tolist() for piece in found] == [[1], [3], [0, 2]]


def test_requests_that_fit_stay_together_in_their_order() -> None:
    assert [piece.tolist() for piece in pieces(np.array([5, 70, 6], np.int32), 8)] == [[0, 1, 2]]


def test_heads_are_divided_into_parts_of_two_and_more() -> None:
    for heads in range(1, 20):
        for at_once in range(1, 20):
            sizes = [part.stop - part.start for part in parts_of_heads(heads, at_once)]
            assert sum(sizes) == heads and max(sizes) == sizes[-1] <= max(at_once, 3)
            assert min(sizes) >= min(2, heads)


# Parts of a request -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [p for p in load_presets() if p.scorer.in_parts], ids=str)
@pytest.mark.parametrize("heads", [4, 5])
def test_parts_give_the_bits_of_the_whole(policy: Policy, heads: int) -> None:
    made_up = MadeUp(kv_heads=heads, heads=2 * heads, tokens=700, learned_sinks=True)
    whole = made_up.view(policy.window, policy.sinks)
    parted = replace(whole, heads_at_once=1)
    assert len(list(parted.parts())) == 2
    scorer = ready(policy.scorer, 2 * heads, made_up.size)
    if isinstance(scorer, AccumulatingScorer):
        ours = torch.cat([scorer.observe(part) for part in parted.parts()])
        assert torch.equal(ours, scorer.observe(whole))
    else:
        assert torch.equal(scorer.score_parts(parted), scorer.score(whole))


def long_request(policy: Policy, tokens: int, heads: int, group: int, size: int) -> ScorerInputs:
    entries = -(-tokens // BLOCK)
    caches = torch.rand(2, entries, heads, BLOCK, size).bfloat16()
    return ScorerInputs(
        num_tokens=tokens,
        window=policy.window,
        sinks=policy.sinks,
        num_query_heads=heads * group,
        num_kv_heads=heads,
        head_size=size,
        first_kv_head=0,
        layer=0,
        num_layers=1,
        scale=size**-0.5,
        soft_cap=0.0,
        queries=torch.rand(max(policy.window, 1), heads * group, size).bfloat16(),
        key_cache=caches[0],
        value_cache=caches[1],
        block_row=torch.arange(entries, dtype=torch.int32),
        last_position=tokens - 1,
        prompt_len=tokens,
        rotary=Rotary(cos_sin(size, tokens + 1)),
        knows_rotary=True,
        asks_ranks=True,
        heads_at_once=heads_at_once(policy, tokens, size, group),
    )


def scored_by_copies() -> list[Policy]:
    presets = [policy for policy in load_presets() if policy.scorer.copies_keys]
    wide = [p.model_copy(update={"window": 200}) for p in presets if p.scorer.needs_queries]
    return presets + wide


@pytest.mark.parametrize("policy", scored_by_copies(), ids=lambda p: f"{p.name}-{p.window}")
@pytest.mark.parametrize(("group", "size"), [(1, 64), (4, 32)])
def test_copies_take_no_more_than_the_scorer_says(monkeypatch, policy, group, size) -> None:
    """The bound holds for a request that is scored whole, and for one that is scored in parts."""
    tokens, heads = 2000, 6
    scorer = ready(policy.scorer, heads * group, size)
    of_head = 4 * tokens * scorer.floats_per_key(policy, size, group)
    for at_once in (heads, 2):
        monkeypatch.setattr(eviction_memory, "COPIES_BYTES", at_once * of_head)
        view = long_request(policy, tokens, heads, group, size)
        with peak_memory() as peak:
            if isinstance(scorer, AccumulatingScorer):
                torch.cat([scorer.observe(part) for part in view.parts()])
            else:
                scorer.score_parts(view)
        spec = SimpleNamespace(num_kv_heads=heads, head_size=size, block_size=BLOCK)
        memory = EvictionMemory(policy, [spec], heads * group, tokens, 1)
        result = 4 * heads * tokens
        assert peak.tensors <= memory.bytes_of_copies() + result
        assert memory.bytes_of_copies() == at_once * of_head + scorer.workspace_bytes
        lane = SimpleNamespace(num_kv_heads=1, head_size=size, block_size=BLOCK)
        of_lanes = EvictionMemory(policy, [lane], heads * group, tokens, 1, tables_per_layer=heads)
        assert of_lanes.bytes_of_copies() == of_head + scorer.workspace_bytes


def test_queries_wait_in_as_many_copies_as_there_may_be_points_in_a_step() -> None:
    """At a step's end they wait, and are joined; those of answers come beside those of prompts."""
    found = []
    for args in ({}, {"schedule": "pressure"}, {"schedule": "pressure", "schedule.answers": 20}):
        policy = load_policy("snapkv", 40, {"window": 8, **args})
        spec = SimpleNamespace(num_kv_heads=KV_HEADS, head_size=SIZE, block_size=BLOCK)
        memory = EvictionMemory(policy, [spec] * 3, HEADS, 500, 5, at_step_end=True)
        found.append(memory.bytes_of_queries() / (5 * 3 * 8 * HEADS * SIZE * 4))
        alone = replace(memory, at_step_end=False)
        assert alone.bytes_of_queries() == 0 and alone.num_bytes < memory.num_bytes
    assert found == [2, 2, 3]


# The worst step ---------------------------------------------------------------------------------


def worst_step(policy: Policy, lens: list[int]) -> tuple[Any, Any, Any]:
    """One layer's attention, its evictions, and the hooks of the policy's methods."""
    source = torch.Generator().manual_seed(0)
    width = -(-max(lens) // BLOCK)
    tables = torch.zeros(len(lens), width, dtype=torch.int32)
    blocks = 1
    for row, tokens in enumerate(lens):
        entries = -(-tokens // BLOCK)
        tables[row, :entries] = torch.arange(blocks, blocks + entries)
        blocks += entries
    caches = torch.randn(2, blocks, KV_HEADS, BLOCK, SIZE, generator=source).bfloat16()
    query = torch.randn(sum(lens), HEADS, SIZE, generator=source).bfloat16()
    plans = [
        EvictionPoint.of(n, 1, min(n, 40), np.array([min(n, 40)]), fill_blocks=False) for n in lens
    ]
    evictions = make_evictions(lens, plans=list(plans))
    rotary = Rotary(cos_sin(SIZE, max(lens) + 600))
    call = make_call(
        tables, ops=cpu, query=query, caches=(caches[0], caches[1]), rotary=rotary, scale=0.2
    )
    tracker = make_tracker(policy, 1, BLOCK, len(lens), heads=KV_HEADS)
    for hooks in tracker.hooks.cache:
        hooks.allocate(blocks)
    return call, evictions, tracker.hooks


@pytest.mark.parametrize("name", ["snapkv", "snapkv-expected", "observed alone"])
@pytest.mark.parametrize("lens", [[20_000], [60] * 200, [60] * 40 + [5_000]], ids=len)
def test_triton_allocates_no_more_than_the_scorer_says(monkeypatch, name, lens) -> None:
    """Its launchers run, and no kernel; on CUDA their tensors are all that evictions take."""
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    policy = small(name.replace("observed alone", "snapkv-expected"))
    if name == "observed alone":
        policy = load_policy("snapkv-expected", budget=40, args={"window": 16, "expected": 0.0})
    call, evictions, _ = worst_step(policy, lens)
    batch = evictions.batch(replace(call, ops=triton_ops), policy, np.arange(len(lens)))
    with peak_memory() as peak:
        scores = policy.scorer.scores(batch)
    of_score, of_head = policy.scorer.kernel_bytes(policy, SIZE, HEADS // KV_HEADS)
    padded = KV_HEADS * len(lens) * max(lens)
    assert scores.numel() <= padded
    said = (8 + of_score) * padded + of_head * HEADS * len(lens)
    assert peak.tensors <= said
    assert name == "snapkv" or said < 1.25 * peak.tensors, "it says much more than that"
    spec = SimpleNamespace(num_kv_heads=KV_HEADS, head_size=SIZE, block_size=BLOCK)
    memory = EvictionMemory(policy, [spec], HEADS, max(lens), len(lens))
    assert memory.bytes_of_scores() > said and not memory.bytes_of_copies()


LENS = [60] * 40 + [20_000] + [60] * 215


def small(name: str) -> Policy:
    return load_policy(name, budget=40, args={"window": 16})


POLICIES = ["snapkv", "snapkv-expected", "keydiff", "h2o", "random"]


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
def test_the_worst_step_stays_within_what_is_reserved(monkeypatch, name) -> None:
    """One longest prompt next to the most short ones; without pieces the step takes more."""
    limit = 4 * KV_HEADS * max(LENS)  # the least: one longest request's scores
    policy = small(name)
    spec = SimpleNamespace(num_kv_heads=KV_HEADS, head_size=SIZE, block_size=BLOCK)
    taken, caches = [], []
    for bound in (limit, 1 << 40):
        monkeypatch.setattr(eviction_memory, "SCORES_BYTES", limit)
        call, evictions, hooks = worst_step(policy, LENS)
        memory = EvictionMemory(
            policy,
            [spec],
            HEADS,
            max(LENS),
            len(LENS),
            threads=torch.get_num_threads(),
            gathers=bool(hooks.after_compact),
        )
        reserved, of_tensors = memory.num_bytes, memory.bytes_of_scores() + memory.bytes_of_copies()
        monkeypatch.setattr(eviction_memory, "SCORES_BYTES", bound)
        with peak_memory() as peak:
            evict_layer(policy, call, evictions, hooks)
        taken.append(peak.tensors)
        caches.append(call.key_cache)
        assert bound > limit or peak.bytes <= reserved, (peak, reserved)
    assert taken[0] <= of_tensors < taken[1], "the step is not bad enough"
    assert torch.equal(*caches), "pieces have changed what stays"
