# SPDX-License-Identifier: Apache-2.0
"""`EvictionTracker.begin_step` against a recomputation request by request, over random batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plans import plan_for
from tests.steps import make_tracker, the_hooks
from vllm_pyramid.methods.accumulated.gather import KeyMass
from vllm_pyramid.plan import DeferredPlan, Eviction, Plan, RetentionPlan
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.request import ALLOCATOR_KEY
from vllm_pyramid.policy.request_keys import RequestKeys
from vllm_pyramid.step.step import Step
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

NUM_LAYERS = 4
BLOCK_SIZE = 8
MAX_REQS = 5
OVERRIDES: list[dict[str, Any] | None] = [
    None,
    {},
    {"kv_policy": "full"},
    {"kv_budget": 12},
    {"kv_budget": "80%"},
    {"somebody_else": 1},
]


Prompt = tuple[int, dict[str, Any] | None]  # its length, and settings of the request
LATER = load_policy("h2o", 24, {"interval": 16})


def make(name: str = "pyramidkv", budget: str | int = "25%") -> tuple[Policy, EvictionTracker]:
    policy = load_policy(name, budget, {})
    return policy, EvictionTracker(policy, NUM_LAYERS, BLOCK_SIZE, MAX_REQS)


def begin(tracker: EvictionTracker, rows: list[tuple[str, int, int, int]]) -> Step:
    """`rows` holds name, prompt length, computed and scheduled tokens of each request."""
    columns = [np.array([row[i] for row in rows], np.int32) for i in (1, 2, 3)]
    return tracker.begin_step([row[0] for row in rows], *columns)


@settings(max_examples=100)
@given(
    data=st.data(), name=st.sampled_from(["pyramidkv", "snapkv", "streaming-llm", "full", "later"])
)
def test_every_step_is_what_its_requests_say(data: st.DataObject, name: str) -> None:
    policy = LATER
    if name != "later":
        policy = load_policy(name, "100%" if name == "full" else "25%", {})
    tracker = EvictionTracker(policy, NUM_LAYERS, BLOCK_SIZE, MAX_REQS)
    window = policy.window if policy.scorer.needs_queries else 1
    prompts: dict[str, Prompt] = {}
    computed: dict[str, int] = {}
    earlier, skips = Step.nothing(NUM_LAYERS, 0), np.zeros((NUM_LAYERS, 0))
    for _ in range(data.draw(st.integers(1, 24), label="steps")):
        action = data.draw(st.sampled_from(["add", "step", "step", "preempt", "finish"]))
        if action == "add" or not prompts:
            request_id = f"r{data.draw(st.integers(0, 6), label='id')}"  # ids come back
            override = data.draw(st.sampled_from(OVERRIDES))
            if name == "full" and override is not None and "kv_budget" in override:
                override = None  # refused for a policy that keeps everything
            prompts[request_id] = (data.draw(st.integers(1, 150), label="prompt"), override)
            computed[request_id] = 0
            tracker.add(request_id, *prompts[request_id])
            continue
        if action != "step":
            request_id = data.draw(st.sampled_from(sorted(prompts)))
            computed[request_id] = 0
            if action == "finish":
                del prompts[request_id], computed[request_id]
                tracker.remove(request_id)
            continue
        names = data.draw(st.permutations(sorted(prompts)))[:MAX_REQS]
        rows = []
        for request_id in names:
            remaining = prompts[request_id][0] - computed[request_id]
            # A request that was preempted comes back in chunks, up to an eviction.
            following = plan_of(policy, prompts[request_id]).next_eviction(computed[request_id])
            most = following - computed[request_id] if following is not None else 9
            scheduled = data.draw(st.just(most) | st.integers(1, most))
            if remaining > 0:
                scheduled = max(scheduled, min(window, remaining))
                if remaining - scheduled < window:
                    scheduled = remaining  # the scheduler's promise
            rows.append((request_id, prompts[request_id][0], computed[request_id], scheduled))
        step = begin(tracker, rows)
        assert (earlier.skips == skips).all(), "a step stays as it was when the next one begins"
        earlier, skips = step, step.skips.copy()
        check(policy, prompts, rows, step, tracker)
        for request_id, _, _, scheduled in rows:
            computed[request_id] += scheduled


def plan_of(policy: Policy, prompt: Prompt) -> Plan:
    """Return the plan of a prompt's length with a request's own settings."""
    length, own = prompt
    return plan_for(policy, RequestKeys.parse(own), length, NUM_LAYERS, BLOCK_SIZE)


def check(
    policy: Policy,
    prompts: dict[str, Prompt],
    rows: list[tuple[str, int, int, int]],
    step: Step,
    tracker: EvictionTracker,
) -> None:
    ending = []
    query_end = 0
    assert step.skips.shape == (NUM_LAYERS, len(rows)) and step.skips.flags.c_contiguous
    for index, (request_id, _, computed, scheduled) in enumerate(rows):
        plan = plan_of(policy, prompts[request_id])
        expected = plan.skip_after(plan.evictions_by(computed))
        assert step.skips[:, index].tolist() == expected.tolist()
        query_end += scheduled
        if plan.next_eviction(computed) == computed + scheduled:
            number = plan.evictions_by(computed + scheduled)
            ending.append((request_id, index, query_end, plan, number))
    if not ending:
        assert step.evictions is None and tracker.end_step() == ({}, {})
        return
    evictions = step.evictions
    assert evictions is not None
    assert evictions.request_ids == [request_id for request_id, *_ in ending]
    assert evictions.rows.tolist() == [index for _, index, *_ in ending]
    assert evictions.query_ends.tolist() == [end for _, _, end, *_ in ending]
    after = [plan.after(number) for *_, plan, number in ending]
    assert evictions.points.tolist() == [point.computed for point in after]
    before = [plan.skip_after(number - 1).tolist() for *_, plan, number in ending]
    assert evictions.previous_skips.T.tolist() == before
    assert evictions.budgets.tolist() == [point.budget_tokens for point in after]
    assert evictions.kept_lens.T.tolist() == [point.held.tolist() for point in after]
    for array in (evictions.query_ends, evictions.points, evictions.kept_lens, step.skips):
        assert array.dtype == np.int32
    evictions.tokens_done += np.arange(len(ending))
    report = {
        request_id: Eviction(i, None, number)
        for i, (request_id, _, _, plan, number) in enumerate(ending)
        if (plan.skip_after(number) != plan.skip_after(number - 1)).any()
    }  # with 0 where nothing was done: the scheduler shall see that
    assert tracker.end_step() == (report, {})
    assert tracker.end_step() == ({}, {}), "reported once"


@pytest.mark.parametrize(
    ("policy", "computed", "scheduled"),
    [("pyramidkv", 40, 25), ("h2o", 40, 25), ("h2o", 64, 65), ("h2o", 100, 29), ("h2o", 100, 93)],
)
def test_a_chunk_over_an_eviction_is_a_bug(policy: str, computed: int, scheduled: int) -> None:
    _, tracker = make(policy)
    tracker.add("r", 64, None)
    with pytest.raises(RuntimeError, match="crosses the eviction at"):
        begin(tracker, [("r", 64, computed, scheduled)])
    tracker.add("r", 64, {"kv_policy": "full"})
    assert not begin(tracker, [("r", 64, computed, scheduled)]).skips.any()


def test_a_last_chunk_shorter_than_the_window_is_a_bug() -> None:
    policy, tracker = make()
    tracker.add("r", 64, None)
    with pytest.raises(RuntimeError, match="fewer than the window"):
        begin(tracker, [("r", 64, 65 - policy.window, policy.window - 1)])
    _, positional = make("streaming-llm")
    positional.add("r", 64, None)
    assert begin(positional, [("r", 64, 62, 2)]).evictions is not None


def test_an_idle_step_has_no_past() -> None:
    _, tracker = make()
    tracker.add("r", 64, None)
    begin(tracker, [("r", 64, 0, 64)])
    step = tracker.idle_step(3)
    assert tracker.step is step and step.evictions is None
    assert step.skips.shape == (NUM_LAYERS, 3) and not step.skips.any()
    assert tracker.end_step() == ({}, {})


def test_a_wrong_override_leaves_the_served_policy() -> None:
    """The scheduler ends such a request with an error; the worker must live until then."""
    policy, tracker = make()
    tracker.add("r", 64, {"kv_policy": "snapkv"})
    evictions = begin(tracker, [("r", 64, 0, 64)]).evictions
    assert evictions is not None
    assert (
        evictions.kept_lens[:, 0].tolist()
        == policy.plan(64, NUM_LAYERS, BLOCK_SIZE).end.held.tolist()
    )


# Lengths that are solved -------------------------------------------------------------------------


def solve(tracker: EvictionTracker, index: int, keep: list[int]) -> RetentionPlan:
    """What the layers do between `begin_step` and `end_step`."""
    evictions = tracker.step.evictions
    assert evictions is not None
    plan = evictions.plans[index]
    assert isinstance(plan, DeferredPlan)
    evictions.resolve(index, np.array(keep))
    resolved = evictions.resolved[index]
    evictions.tokens_done[index] += int(resolved.end.skip.sum())
    return resolved


def test_a_solved_skip_holds_from_the_next_step_on() -> None:
    _, tracker = make("xkv")
    tracker.add("r", 64, None)
    evictions = begin(tracker, [("r", 64, 0, 64)]).evictions
    assert evictions is not None and evictions.deferred.tolist() == [0]
    assert evictions.is_reported.tolist() == [True]
    assert evictions.kept_lens[:, 0].tolist() == [64] * NUM_LAYERS, (
        "nothing is given before it is solved"
    )
    resolved = solve(tracker, 0, [8, 30, 16, 10])
    assert evictions.kept_lens[:, 0].tolist() == resolved.end.held.tolist() == [8, 32, 16, 16]
    assert evictions.budgets.tolist() == [16]
    assert tracker.end_step() == ({"r": Eviction(184, (8, 30, 16, 10))}, {})
    assert tracker.end_step() == ({}, {})
    for computed in (64, 65):
        skips = begin(tracker, [("r", 64, computed, 1)]).skips
        assert skips[:, 0].tolist() == [56, 32, 48, 48]
        assert tracker.end_step() == ({}, {})


def test_recomputation_solves_again_and_forgets_the_old_lengths() -> None:
    _, tracker = make("xkv")
    tracker.add("r", 64, None)
    for keep in ([8, 30, 16, 10], [40, 8, 8, 8]):
        first = begin(tracker, [("r", 64, 0, 40)])
        assert first.evictions is None and not first.skips.any()
        assert tracker.end_step() == ({}, {})
        last = begin(tracker, [("r", 64, 40, 24)])
        assert last.evictions is not None and last.evictions.deferred.size == 1
        resolved = solve(tracker, 0, keep)
        assert tracker.end_step()[0]["r"].keep == tuple(keep)
        skips = begin(tracker, [("r", 64, 64, 1)]).skips
        assert skips[:, 0].tolist() == resolved.end.skip.tolist()


def test_a_prompt_that_ended_unsolved_is_a_bug() -> None:
    _, tracker = make("xkv")
    tracker.add("r", 64, None)
    begin(tracker, [("r", 64, 0, 64)])
    with pytest.raises(RuntimeError, match="were not decided"):
        tracker.end_step()


def test_solved_and_whole_prompts_in_one_step() -> None:
    _, tracker = make("xkv", 20)
    tracker.add("whole", 64, {"kv_policy": "full"})
    tracker.add("a", 64, None)
    tracker.add("short", 10, None)
    tracker.add("b", 100, {"kv_budget": 30})
    rows = [("whole", 64, 0, 64), ("a", 64, 0, 64), ("short", 10, 0, 10), ("b", 100, 0, 100)]
    evictions = begin(tracker, rows).evictions
    assert evictions is not None and evictions.deferred.tolist() == [1, 3]
    solve(tracker, 1, [20, 20, 20, 20])
    solve(tracker, 3, [90, 10, 10, 10])
    assert {name: done.keep for name, done in tracker.end_step()[0].items()} == {
        "a": (20, 20, 20, 20),
        "b": (90, 10, 10, 10),
    }
    rows = [("b", 100, 100, 1), ("short", 10, 10, 1), ("a", 64, 64, 1), ("whole", 64, 64, 1)]
    skips = begin(tracker, rows).skips
    assert skips.T.tolist() == [[8, 88, 88, 88], [0] * 4, [40] * 4, [0] * 4]
    for name in ("a", "b", "short", "whole"):
        tracker.remove(name)
    assert not tracker._requests and not tracker._num_open


def test_averaged_shares_are_known_beforehand() -> None:
    """Online sampling: what the scheduler sent along takes the place of the solver."""
    _, tracker = make("xkv", 20)
    tracker.add("solved", 64, None)
    shares = {"kind": "shares", "shares": [0.0, 0.25, 0.25, 0.5]}
    tracker.add("averaged", 64, {ALLOCATOR_KEY: shares})
    rows = [("solved", 64, 0, 64), ("averaged", 64, 0, 64)]
    evictions = begin(tracker, rows).evictions
    assert evictions is not None and evictions.deferred.tolist() == [0]
    assert evictions.kept_lens[:, 1].tolist() == [8, 24, 24, 32]  # 8, 20, 20, 32 in whole blocks
    solve(tracker, 0, [20] * NUM_LAYERS)
    evictions.tokens_done[1] += 168
    assert tracker.end_step()[0] == {
        "solved": Eviction(160, (20,) * NUM_LAYERS),
        "averaged": Eviction(168),
    }


# Evictions during generation ---------------------------------------------------------------------

LOOKING_BACK = load_policy("scissorhands", 24, {"interval": 16, "queries": 10, "window": 2})


def test_which_queries_count() -> None:
    never = np.iinfo(np.int32).max
    rows = [("a", 50, 0, 50), ("b", 50, 50, 1), ("c", 50, 66, 1), ("full", 50, 66, 1)]
    for policy, expected in (
        (LATER, [0, 0, 0, never]),
        # The last 10 queries before the evictions at 50, 66 and 82 tokens.
        (LOOKING_BACK, [40, 56, 72, never]),
        (LATER.model_copy(update={"schedule": "prompt_end"}), [0, *[never] * 3]),
    ):
        tracker = make_tracker(policy, NUM_LAYERS, BLOCK_SIZE, MAX_REQS)
        mass = the_hooks(tracker, KeyMass)
        for name, *_ in rows:
            tracker.add(name, 50, {"kv_policy": "full"} if name == "full" else None)
        begin(tracker, rows)
        assert mass.first_queries.dtype == np.int32
        assert mass.first_queries.tolist() == expected
        tracker.idle_step(len(rows))
        assert mass.first_queries is None
    assert not list(make_tracker(make()[0], NUM_LAYERS, BLOCK_SIZE, MAX_REQS).hooks)
