# SPDX-License-Identifier: Apache-2.0
"""A step whose prompts are thinned: its shape in every layer, and what moves in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.steps import make_call, make_tracker, the_hooks
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.methods.thinning.step import StepThinning
from vllm_pyramid.methods.thinning.worker import Thinner
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

pytestmark = pytest.mark.cpu

LAYERS, BLOCK, HEADS, GROUPS, SIZE = 5, 8, 4, 2, 16
ARGS: dict[str, Any] = {
    "piece_tokens": 48,
    "interval": 2,
    "decay_ratio": 0.4,
    "min_context": 8,
    "recent_ratio": 0.25,
    "sinks": 2,
}


class Cache:
    """One paged cache for all layers. A token's key and value say which token it is, exactly."""

    def __init__(self, requests: int, longest: int) -> None:
        entries = -(-longest // BLOCK)
        order = torch.randperm(LAYERS * requests * entries)
        self.tables = order.view(LAYERS, requests, entries).to(torch.int32)
        shape = (len(order), GROUPS, BLOCK, SIZE)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def held(self, layer: int, request: int, start: int, end: int) -> list[int]:
        """The tokens that stand in positions `start .. end - 1`, by what K and V say."""
        table = self.tables[layer, request]
        k = reference.gather_tokens(self.keys, table, start, end)
        v = reference.gather_tokens(self.values, table, start, end)
        assert (k[:, :, 0] == k[:, :1, 0]).all() and (v[:, :, 1] == k[:, :, 0]).all()
        return k[:, 0, 0].int().tolist()


class Placed:
    """In place of a trace: what it was told that each request holds in each layer."""

    def __init__(self) -> None:
        self.layers: dict[str, list[list[int]]] = {}

    def place(self, request_id: str, layers: list[torch.Tensor]) -> None:
        self.layers[request_id] = [positions.tolist() for positions in layers]


def _make(policy: Policy, requests: int) -> tuple[EvictionTracker, Thinner]:
    tracker = make_tracker(policy, LAYERS, BLOCK, requests, heads=GROUPS)
    thinner: Thinner = the_hooks(tracker, Thinner)
    return tracker, thinner


def _run_step(
    tracker: EvictionTracker,
    thinner: Thinner,
    cache: Cache,
    rows: list[tuple[str, int, int, int]],
) -> dict[str, list[list[int]]]:
    """A step as the layers of a model take it; returns what each layer holds of each request.

    `rows` are name, prompt length, computed and scheduled tokens; a request's name is its row in
    the cache.
    """
    columns = [np.array([row[i] for row in rows], np.int32) for i in (1, 2, 3)]
    step = tracker.begin_step([row[0] for row in rows], *columns)
    thinning = step.layout
    assert isinstance(thinning, StepThinning) and step.wants_log_sum_exp
    tokens = torch.cat([torch.arange(c, c + s) for _, _, c, s in rows])
    owner = torch.cat([torch.full((s,), i) for i, (*_, s) in enumerate(rows)])
    order = torch.tensor([int(row[0]) for row in rows])
    step_slots = []
    for layer in range(LAYERS):
        blocks = cache.tables[layer][order[owner], tokens // BLOCK].long()
        step_slots.append(blocks * BLOCK + tokens % BLOCK)
    held: dict[str, list[list[int]]] = {row[0]: [] for row in rows}
    entered, owner_of = tokens, owner
    for layer in range(LAYERS):
        starts = thinning.query_starts[layer]
        assert int(starts[-1]) == len(entered)
        for i in range(len(rows)):
            assert (owner_of[starts[i] : starts[i + 1]] == i).all()
        rotated = torch.randn(len(entered), HEADS, SIZE)
        key = torch.zeros(len(entered), GROUPS, SIZE)
        key[:, :, 0] = entered[:, None]
        value = torch.zeros_like(key)
        value[:, :, 1] = entered[:, None]
        slots = thinning.slots(layer, step_slots[layer])
        cpu.reshape_and_cache(key, value, cache.keys, cache.values, slots)
        for i, (name, _, computed, scheduled) in enumerate(rows):
            skip, end = int(thinning.skips[layer, i]), int(thinning.seq_lens[layer, i])
            seen = cache.held(layer, int(name), skip, end)
            new = entered[starts[i] : starts[i + 1]].tolist()
            assert seen[len(seen) - len(new) :] == new, "what the layer attends to ends in its own"
            assert seen == sorted(set(seen)) and end <= computed + scheduled
        thinner.after_attention(
            make_call(
                cache.tables[layer][order],
                layer=layer,
                ops=cpu,
                query=rotated,
                caches=(cache.keys, cache.values),
                scale=0.25,
            )
        )
        for name, prompt_len, computed, scheduled in rows:
            plan = tracker.policy.plan(prompt_len, LAYERS, BLOCK)
            assert isinstance(plan, RetentionPlan)
            end = computed + scheduled
            keep = int(plan.end.held[layer])
            if (piece := plan.piece_at(computed)) is not None:
                keep = int(piece.before[layer] + piece.held[layer])
            elif not plan.pieces or end > prompt_len:
                keep = end - (int(plan.end.skip[layer]) if computed >= prompt_len else 0)
            held[name].append(cache.held(layer, int(name), end - keep, end))
        if (survivors := thinning.survivors) is not None:
            thinning.survivors = None
            entered, owner_of = entered[survivors], owner_of[survivors]
    return held


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 130), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_pieces_in_the_cache(lengths: list[int], fill_blocks: bool, seed: int) -> None:
    """Step by step: what stays are tokens of the layer below, in order, sinks and recents too."""
    torch.manual_seed(seed)
    policy = load_policy("pyramidinfer", None, {**ARGS, "fill_blocks": fill_blocks})
    names = [str(i) for i in range(len(lengths))]
    tracker, thinner = _make(policy, len(lengths))
    placed = Placed()
    thinner.trace = placed  # type: ignore[assignment]
    cache = Cache(len(lengths), max(lengths) + 8)
    for name, n in zip(names, lengths, strict=True):
        tracker.add(name, n, None)
    plans = [policy.plan(n, LAYERS, BLOCK) for n in lengths]
    computed = [0] * len(lengths)
    while any(c < n for c, n in zip(computed, lengths, strict=True)):
        rows = []
        for i, n in enumerate(lengths):
            plan = plans[i]
            assert isinstance(plan, RetentionPlan)
            piece = plan.piece_at(computed[i])
            scheduled = piece.tokens if piece else max(1, n - computed[i])
            if computed[i] < n + 8:
                rows.append((names[i], n, computed[i], scheduled))
        if not any(
            plans[int(r[0])].piece_at(r[2])
            for r in rows  # type: ignore[union-attr]
        ):
            columns = [np.array([row[i] for row in rows], np.int32) for i in (1, 2, 3)]
            assert tracker.begin_step([r[0] for r in rows], *columns).layout is None
            break
        held = _run_step(tracker, thinner, cache, rows)
        for name, n, before, scheduled in rows:
            i = int(name)
            plan = plans[i]
            assert isinstance(plan, RetentionPlan)
            piece = plan.piece_at(before)
            if piece is not None:
                below: set[int] = set(range(before + scheduled))
                traced = tracker._requests[name].state[Thinner.name].positions.layers()
                for layer, tokens in enumerate(held[name]):
                    assert tokens == sorted(tokens) and set(tokens) <= below
                    assert set(range(piece.end - piece.recent, piece.end)) <= set(tokens)
                    assert set(range(min(n, 2))) <= set(tokens), "sinks"
                    assert traced[layer].tolist() == tokens
                    below = set(tokens)
            computed[i] += scheduled
        report, _ = tracker.end_step()
        for name, n, before, scheduled in rows:
            plan = plans[int(name)]
            assert isinstance(plan, RetentionPlan)
            if plan.pieces and before + scheduled == n:
                assert report[name].tokens == int(plan.end.skip.sum())
                assert placed.layers[name] == held[name]


def test_a_recomputed_prompt_counts_once() -> None:
    """Preempted between two pieces: what it gave up the first time does not count."""
    policy = load_policy("pyramidinfer", None, ARGS)
    plan = policy.plan(100, LAYERS, BLOCK)
    assert isinstance(plan, RetentionPlan)
    tracker, thinner = _make(policy, 1)
    tracker.add("0", 100, None)
    cache = Cache(1, 100)
    _run_step(tracker, thinner, cache, [("0", 100, 0, 48)])
    assert tracker.end_step() == ({}, {})
    for computed, scheduled in ((0, 48), (48, 48), (96, 4)):
        _run_step(tracker, thinner, cache, [("0", 100, computed, scheduled)])
        report, _ = tracker.end_step()
    assert report["0"].tokens == int(plan.end.skip.sum()) > 0


def test_a_step_inside_a_piece_is_an_error() -> None:
    policy = load_policy("pyramidinfer", None, ARGS)
    tracker, _ = _make(policy, 1)
    tracker.add("0", 100, None)
    one = [np.array([value], np.int32) for value in (100, 0, 40)]
    with pytest.raises(RuntimeError, match="must be computed whole"):
        tracker.begin_step(["0"], *one)
    one[1][0] = 40
    with pytest.raises(RuntimeError, match="inside a piece"):
        tracker.begin_step(["0"], *one)
