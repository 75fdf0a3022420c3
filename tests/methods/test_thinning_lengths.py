# SPDX-License-Identifier: Apache-2.0
"""Lengths of prompts that are thinned between layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.steps import make_context, make_tracker
from vllm_pyramid.methods.thinning import DecayAllocator
from vllm_pyramid.methods.thinning.generated import GeneratedMass
from vllm_pyramid.methods.thinning.worker import Thinner
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy import Policy, load_policy

ARGS = st.fixed_dictionaries(
    {
        "decay_curve": st.sampled_from(["cosine", "linear"]),
        "decay_ratio": st.floats(0.0, 1.0),
        "interval": st.integers(1, 5),
        "min_context": st.integers(4, 200),
        "recent_ratio": st.floats(0.01, 1.0),
        "piece_tokens": st.integers(2, 4096),
        "fill_blocks": st.booleans(),
        "sinks": st.integers(0, 4),
    }
)


def _plan(policy: Policy, prompt_len: int, layers: int, block_size: int = 16) -> RetentionPlan:
    plan = policy.plan(prompt_len, layers, block_size)
    assert isinstance(plan, RetentionPlan)
    return plan


@settings(max_examples=300)
@given(
    ARGS,
    st.integers(0, 12_000),
    st.integers(1, 80),
    st.sampled_from([1, 8, 16, 128]),
    st.integers(1, 100),
)
def test_lengths(args: dict[str, Any], n: int, layers: int, block_size: int, percent: int) -> None:
    policy = load_policy("pyramidinfer", f"{percent}%", args)
    plan = _plan(policy, n, layers, block_size)
    unit = block_size if policy.fill_blocks else 1
    # A token that left cannot come back, also where lengths are rounded to blocks.
    assert (np.diff(plan.end.keep) <= 0).all() and (np.diff(plan.end.held) <= 0).all()
    assert (plan.end.held == n - plan.end.skip).all() and (plan.end.skip % unit == 0).all()
    assert plan.budget_tokens == -(-int(plan.end.keep.sum()) // layers)
    assert plan.evicts == bool(plan.pieces)
    if not plan.pieces:
        assert (plan.end.held == n).all()
        return
    size = args["piece_tokens"]
    assert [piece.start for piece in plan.pieces] == list(range(0, n, size))
    assert [piece.end for piece in plan.pieces] == [*range(size, n, size), n]
    before = np.zeros(layers, int)
    for piece in plan.pieces:
        tokens = piece.tokens
        recent = max(1, int(tokens * args["recent_ratio"]))
        assert piece.recent == recent
        assert (piece.before == before).all()
        assert piece.enters.tolist() == [tokens, *piece.held[:-1]]
        # Everything is kept up to the floor: the recent sequence and `min_context` tokens.
        assert (piece.held >= min(tokens, recent + args["min_context"])).all()
        assert (piece.held <= piece.enters).all()
        assert ((tokens - piece.held) % unit == 0).all()
        assert piece.sinks == (args["sinks"] if piece.start == 0 else 0)
        # Only every `interval`-th layer thins, the first one never: its share is 1.
        thins = np.flatnonzero(piece.held < piece.enters)
        assert (thins % args["interval"] == 0).all()
        assert 0 not in thins
        assert plan.piece_at(piece.start) is piece
        before += piece.held
    assert (before == plan.end.held).all()
    assert plan.piece_at(n) is None


@settings(max_examples=150)
@given(ARGS, st.integers(2, 4096), st.integers(1, 80), st.floats(0.0, 1.0))
def test_a_budget_is_an_upper_limit(args, tokens, layers, share) -> None:
    """The most that fits: at once below the schedule's own lengths and as near as tokens allow."""
    thinner = load_policy("pyramidinfer", None, args).allocator
    assert isinstance(thinner, DecayAllocator)
    free = thinner.lengths(tokens, layers)
    least = thinner.lengths(tokens, layers, 0.0)
    kept = thinner.lengths(tokens, layers, share)
    most = math.floor(share * tokens * layers)
    assert kept.sum() <= max(most, int(least.sum()))
    assert (least <= kept).all() and (kept <= free).all()
    if free.sum() <= most:
        assert (kept == free).all()


def test_the_papers_settings_by_hand() -> None:
    """8 layers, 1000 tokens, 800 of them context: shares 1, 0.97.., 0.9, 0.82.. in layers 0, 2, ..

    r(2) = 0.8 + 0.1 * (cos(pi / 4) + 1) = 0.97071, r(4) = 0.9, r(6) = 0.82929.
    """
    plan = _plan(load_policy("pyramidinfer"), 1000, 8)
    assert plan.end.keep.tolist() == [1000, 1000, 976, 976, 898, 898, 778, 778]
    assert plan.end.held.tolist() == [1000, 1000, 984, 984, 904, 904, 792, 792]
    assert plan.pieces[0].recent == 200 and plan.pieces[0].sinks == 4
    linear = load_policy("pyramidinfer", None, {"decay_curve": "linear", "fill_blocks": False})
    # 0.95, 0.9, 0.85
    assert _plan(linear, 1000, 8).end.held.tolist() == [1000, 1000, 960, 960, 884, 884, 781, 781]


@pytest.mark.parametrize(("layers", "percent"), [(32, 74.2), (40, 70.6), (80, 59.8)])
def test_what_the_papers_settings_come_to(layers: int, percent: float) -> None:
    """The docstring of `methods/thinning/engine.py` has these figures."""
    plan = _plan(load_policy("pyramidinfer", None, {"piece_tokens": 4096}), 4096, layers)
    assert 100 * plan.end.keep.mean() / 4096 == pytest.approx(percent, abs=0.1)
    half = _plan(load_policy("pyramidinfer", "50%", {"interval": 1}), 4096, layers)
    assert 0.48 < half.end.keep.mean() / 4096 <= 0.5


@settings(max_examples=150)
@given(
    ARGS,
    st.fixed_dictionaries(
        {
            "gen_interval": st.integers(1, 40),
            "gen_compress_ratio": st.floats(0.0, 1.0),
            "gen_decay_ratio": st.floats(0.0, 1.0),
        }
    ),
    st.integers(1, 5),
    st.integers(0, 5000),
    st.integers(1, 40),
    st.sampled_from([1, 8, 16, 128]),
)
def test_lengths_of_what_is_generated(args, generated, windows, n, layers, block_size) -> None:
    """A share of all that left the window, whole blocks, nothing comes back."""
    size = generated["gen_interval"]
    window = windows * size
    all_args = {**args, "schedule": "thin_generated", **generated, "gen_window": window}
    policy = load_policy("pyramidinfer", None, all_args)
    plan = _plan(policy, n, layers, block_size)
    assert plan.evicts and plan.every == size
    at_prompt = _plan(load_policy("pyramidinfer", None, args), n, layers, block_size)
    assert (plan.end.held == at_prompt.end.held).all() and len(plan.pieces) == len(at_prompt.pieces)
    before = plan.end.skip
    for number in range(2, 20):
        now, count = plan.after(number), (number - 1) * size
        left = max(0, count - window)
        kept = policy.schedule.kept(left, layers)  # type: ignore[attr-defined]
        low, high = generated["gen_decay_ratio"], 1.0
        for layer in range(layers):
            part = low + (high - low) * (math.cos(math.pi * layer / layers) + 1) / 2
            assert abs(kept[layer] - left * generated["gen_compress_ratio"] * part) < 1 + 1e-6
        assert now.computed == n + count and not now.in_pieces
        assert (now.keep == plan.end.held + kept + count - left).all()
        assert (now.front == plan.end.held).all() and (now.recent == count - left).all()
        unit = block_size if args["fill_blocks"] else 1
        gone = left - kept
        assert (now.skip == plan.end.skip + gone // unit * unit).all()
        # What goes was in the groups that left, also where the next block's worth goes at once.
        assert (now.skip >= before).all() and (gone >= 0).all()
        if left:
            of_group = policy.schedule.kept_of_group(left // size, layers)  # type: ignore[attr-defined]
            assert ((of_group >= 0) & (of_group <= size)).all()
        before = now.skip


def test_who_gathers_while_it_generates() -> None:
    context = make_context(4)
    policy = load_policy("pyramidinfer", None, {"schedule": "thin_generated"})
    assert policy.works_in_every_step and policy.min_last_chunk == 1
    assert [type(hooks) for hooks in policy.worker_hooks(context)] == [GeneratedMass, Thinner]
    once = load_policy("pyramidinfer")
    assert not once.works_in_every_step and once.min_last_chunk == 2
    assert [type(hooks) for hooks in once.worker_hooks(context)] == [Thinner]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"scorer": "recency"}, "only go together, not with 'recency', 'decay'"),
        ({"allocator": "uniform"}, "only go together, not with 'recent_ensemble', 'uniform'"),
        ({"selector": "top_k"}, "only go together"),
        ({"window": 8}, "`window` must be 0"),
        ({"sinks": 65}, "`sinks` at most the min_context of 64"),
        ({"decay_ratio": 1.2}, "decay_ratio"),
        ({"piece_tokens": 1}, "piece_tokens"),
        ({"schedule": "interval"}, "by the schedule thin_generated, not by 'interval'"),
        (
            {"schedule": "thin_generated", "gen_window": 40},
            "gen_window 40 must be a multiple of gen_interval 16",
        ),
    ],
)
def test_wrong_parts(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_policy("pyramidinfer", None, args)


def test_budgets_are_shares() -> None:
    with pytest.raises(ValueError, match="a percentage such as 50%, not 512 tokens"):
        load_policy("pyramidinfer", 512)


def test_a_step_inside_a_piece_is_an_error() -> None:
    policy = load_policy("pyramidinfer", None, {"piece_tokens": 48, "min_context": 8})
    tracker = make_tracker(policy, 5, 8, 1)
    tracker.add("0", 200, None)
    for computed, scheduled, said in (
        (0, 40, "must be computed whole"),
        (40, 40, "inside a piece"),
    ):
        columns = (np.array([number], np.int32) for number in (200, computed, scheduled))
        with pytest.raises(RuntimeError, match=said):
            tracker.begin_step(["0"], *columns)
