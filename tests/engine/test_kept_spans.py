# SPDX-License-Identifier: Apache-2.0
"""A first span that is longer than the budget stays at every eviction of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conversations import talk
from tests.engine.support import (
    Engine,
    Job,
    Outcome,
    Start,
    assert_same_tokens,
    greedy,
    random_prompts,
)
from tests.scheduler.checks import check_pool
from vllm_pyramid.policy import planning

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "max_model_len": 1024,
}
SPAN = 180


def _check(engine: Engine, folder: Path, outcome: Outcome, fixed: int) -> None:
    """Every layer and head keeps the span, and its budget of the other tokens."""
    report, tokens = outcome.report, len(outcome.job.prompt)
    assert report["protected_tokens"] == SPAN - fixed and report["kv_keep"] == [0, SPAN]
    kept = report["kept_tokens"]
    mean = report["kv_budget"] + report["protected_tokens"]
    assert mean * len(kept) <= sum(kept) < (mean + 16) * len(kept)
    assert report["evicted_tokens"] == len(kept) * tokens - sum(kept) > 0
    with np.load(folder / f"{outcome.request_id}.npz") as file:
        for layer in range(engine.num_layers):
            for head in file[f"kept_{layer}"].tolist():
                assert head[:SPAN] == [*range(SPAN)] and len(head) == kept[layer]


def test_in_each_turn_of_a_conversation(tiny: Start, tmp_path: Path) -> None:
    """A turn that resumes says what one says that computes all turns again."""
    said = random_prompts([300, 150, 20, 90], seed=8)
    args = {"window": 8, "sinks": 2}
    own = {"kv_policy": "pyramidkv", "kv_budget": 48, "kv_policy_args": args, **SETTINGS}
    found = []
    for caching in (False, True):
        engine = tiny("mistral", **own, enable_prefix_caching=caching, kv_trace=str(tmp_path))
        turns = talk(engine, said, kv_keep=[0, SPAN])
        resumed = [turn.report["resumed_tokens"] > 0 for turn in turns]
        assert resumed == [False, *[caching] * 3]
        for turn in turns:
            _check(engine, tmp_path, turn, args["sinks"])
        found.append(turns)
        engine.check_whole()
    assert_same_tokens(found[1], found[0])


def test_inside_the_prompt(tiny: Start, tmp_path: Path) -> None:
    """The span is longer than what a point keeps, and ends behind the first of them."""
    engine = tiny(
        "mistral",
        kv_policy="snapkv",
        kv_budget=48,
        kv_policy_args={"chunk": {"tokens": 128, "keep": 96, "window": 8}, "window": 8},
        kv_trace=str(tmp_path),
        **SETTINGS,
    )
    jobs = [Job(prompt, greedy(8, kv_keep=[0, SPAN])) for prompt in random_prompts([700, 420])]
    for outcome in engine.run(jobs):
        assert outcome.report["inner_evictions"] > 0
        _check(engine, tmp_path, outcome, 0)
    engine.check_whole()


def test_requests_share_the_blocks_of_a_span(tiny: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind their evictions, too: a span that several prompts begin with takes memory once."""
    span, tails = random_prompts([330], seed=9)[0], random_prompts([150] * 4, seed=10)
    jobs = [Job([*span, *tail], greedy(24, kv_keep=[0, 330])) for tail in tails]
    own = {"kv_policy": "pyramidkv", "kv_budget": 48, "kv_policy_args": {"window": 8}, **SETTINGS}
    held: list[int] = []

    def count(engine: Engine) -> None:
        if len(engine.scheduler.running) == len(jobs) and all(
            engine.coordinator.plans.has_evicted(request.request_id)
            for request in engine.scheduler.running
        ):
            held.append(int(engine.coordinator.counters.held_blocks.sum()))

    engine = tiny("mistral", **own)
    shared = engine.run(jobs, count)
    with_shared = max(held)
    engine.check_whole()
    monkeypatch.setattr(planning, "stays_in_place", lambda *_: 0)
    planning.plan_prompt.cached.clear()
    try:
        held.clear()
        copied = engine.run([replace(job, name=f"{job.name} again") for job in jobs], count)
    finally:
        planning.plan_prompt.cached.clear()
    assert [one.token_ids for one in shared] == [one.token_ids for one in copied]
    whole, layers = 330 // engine.block_size, engine.num_layers
    assert max(held) - with_shared == (len(jobs) - 1) * whole * layers
    engine.check_whole()


def test_a_span_in_a_pool_that_runs_out(tiny: Start) -> None:
    """Requests are preempted and come back, share the span with others, and say the same."""
    span, tails = random_prompts([SPAN], seed=11)[0], random_prompts([90, 130, 70, 110], seed=12)
    jobs = [
        Job([*span, *tail], greedy(80, kv_keep=[0, SPAN]), arrival=4 * number)
        for number, tail in enumerate(tails)
    ]
    own = {"kv_policy": "snapkv", "kv_budget": 40, "kv_policy_args": {"window": 8}, **SETTINGS}
    roomy = tiny("mistral", **own)
    expected = [outcome.token_ids for outcome in roomy.run(jobs)]
    small = tiny(
        "mistral",
        **own | {"max_model_len": 400},
        kv_admission="prompt",
        num_gpu_blocks_override=106,
    )
    seen: Counter[str] = Counter()

    def watch(engine: Engine) -> None:
        for request in engine.scheduler.requests.values():
            seen["preempted"] = max(seen["preempted"], request.num_preemptions)
        check_pool(engine.coordinator)

    again = small.run([replace(job, name=f"{job.name} again") for job in jobs], watch)
    assert [outcome.token_ids for outcome in again] == expected
    assert seen["preempted"], "the pool did not run out"
    small.check_whole()
