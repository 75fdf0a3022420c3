# SPDX-License-Identifier: Apache-2.0
"""Answers that are evicted when the pool lacks blocks (`--kv-evict pressure` with `answers`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import (
    Engine,
    Job,
    Start,
    count_preemptions,
    greedy,
    kept_at_evictions,
    random_prompts,
)
from tests.engine.test_pressure import SETTINGS, _same, _short_of
from vllm_pyramid.worker.answer_levels import AnswerLevels

LENGTHS = (300, 77, 512, 20)
EVERY = 48
UNLIMITED = 1 << 20


def _settings(policy: str, every: int = EVERY, **further: Any) -> dict[str, Any]:
    args = {**SETTINGS["kv_policy_args"], **further.pop("kv_policy_args", {})}
    args["schedule"] = {"kind": "pressure", "answers": every}
    return {
        **SETTINGS,
        "kv_policy": policy,
        "kv_evict": "pressure",
        "kv_policy_args": args,
    } | further


def _late(engine: Engine) -> AnswerLevels:
    late = engine.core.model_executor.driver_worker.worker.model_runner.pyramid.late
    assert isinstance(late, AnswerLevels)
    return late


@contextmanager
def _positions(engine: Engine) -> Iterator[list[tuple[int, int, list[list[int]]]]]:
    """Collect what each first order of a request keeps: its point, the layer, and positions."""
    late, found = _late(engine), []
    compact = late._compact

    def compacted(own: Any, skip: Any, point: Any, level: int, blocks: Any) -> Any:
        for layer, marks in zip(own.layers.tolist(), own.marks, strict=True):
            if not skip[layer]:
                kept = [(row > level).nonzero().flatten().tolist() for row in marks]
                found.append((point.computed, layer, kept))
        return compact(own, skip, point, level, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "_compact", compacted)
        yield found


@pytest.mark.parametrize("further", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_answers_are_exact_while_there_is_room(tiny: Start, further: dict[str, Any]) -> None:
    """Points come and go, nothing is evicted, and the tokens are those of `full`."""
    engine = tiny("mistral", **_settings("auto", **further))
    prompts = random_prompts(LENGTHS, seed=5)
    jobs = [Job(prompt, greedy(110, logprobs=2), salt="a") for prompt in prompts]
    full = [Job(p, greedy(110, logprobs=2, kv_policy="full"), salt="b") for p in prompts]
    seen, evictions_at = [], _late(engine)._evictions_at

    def watched(*args: Any) -> Any:
        found = evictions_at(*args)
        seen.extend(zip(found[0].request_ids, found[0].points.tolist(), strict=True))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_late(engine), "_evictions_at", watched)
        found = engine.run(jobs)
    assert sorted(point for _, point in seen) == sorted(
        length + count * EVERY for length in LENGTHS for count in (1, 2)
    )
    _same(found, engine.run(full))
    for one in found:
        assert one.report["evicted_to"] == [] and one.report["evicted_tokens"] == 0
        assert one.report["prompt_tokens"] == len(one.job.prompt)
    engine.check_whole()


@pytest.mark.parametrize(
    ("policy", "further", "own"),
    [
        ("auto", {}, {}),
        ("snapkv", {"kv_cache_dtype": "fp8"}, {}),
        ("pyramidkv", {}, {"kv_keep": [0, 18]}),
        ("streaming-llm", {"kv_budget": 60}, {}),
        ("keydiff", {"async_scheduling": True}, {}),
    ],
)
def test_an_order_at_a_point_is_an_eviction_of_a_prompt_of_that_length(
    tiny: Start, tmp_path: Path, policy: str, further: dict[str, Any], own: dict[str, Any]
) -> None:
    """`always` evicts a prompt that is the first one and what was generated up to the point."""
    after = 14
    settings = _settings(policy, **further)
    engine = tiny("mistral", **settings)
    engine.shuffle_blocks()
    prompts = random_prompts(LENGTHS, seed=5)
    jobs = [Job(p, greedy(EVERY + after, logprobs=2, **own)) for p in prompts]

    def missing(step: int) -> int:
        return UNLIMITED if step > EVERY else -UNLIMITED

    with _positions(engine) as ordered, _short_of(engine, missing):
        found = engine.run(jobs)
    del settings["kv_evict"]
    del settings["kv_policy_args"]["schedule"]
    always = tiny("mistral", **settings, kv_trace=str(tmp_path))
    longer = [[*one.job.prompt, *one.token_ids[:EVERY]] for one in found]
    expected = always.run([Job(prompt, greedy(after, logprobs=2, **own)) for prompt in longer])
    for one, other in zip(found, expected, strict=True):
        point = len(one.job.prompt) + EVERY
        kept = kept_at_evictions(tmp_path, other)[point]
        positions = {layer: rows for at, layer, rows in ordered if at == point}
        assert {len(rows[0]) for rows in positions.values()} <= set(other.report["kept_tokens"])
        for layer, rows in positions.items():
            assert rows == kept[layer].tolist(), (point, layer)
        if not further.get("async_scheduling"):  # there the order comes a step later
            assert one.token_ids[EVERY:] == other.token_ids
        if not other.report["evicted_tokens"]:
            assert one.report["evicted_to"] == [] and not positions
            continue
        for key in ("kept_tokens", "evicted_tokens", "blocks_after", "blocks_before"):
            assert one.report[key] == other.report[key]
        assert one.report["computed_tokens"] == point
        assert one.report["evicted_after"] == [EVERY + 1]
        assert one.report["evicted_to"] == [other.report["kv_budget"]]
        assert 0 < one.report["lost_share"] < 1
    assert any(one.report["evicted_to"] for one in found)
    engine.check_whole()


def test_several_orders_at_a_point_keep_what_one_does(tiny: Start) -> None:
    """Level after level behind a point, then again behind the next one: each gives blocks back."""
    engine = tiny("mistral", **_settings("pyramidkv"))
    prompts = random_prompts(LENGTHS[:3], seed=5)

    def by_steps(step: int) -> int:
        """Some blocks at a time, behind the first point and behind the second."""
        return 24 if step % EVERY > 1 and step > EVERY and step % 5 == 3 else -UNLIMITED

    with _short_of(engine, by_steps):
        found = engine.run([Job(p, greedy(3 * EVERY, logprobs=2)) for p in prompts])
    engine.check_whole()
    for one in found:
        after = one.report["evicted_after"]
        assert after == sorted(after) and len(after) == len(one.report["evicted_to"])
        assert one.report["evicted_tokens"] > 0
    points = [{count // EVERY for count in one.report["evicted_after"]} for one in found]
    assert any(len(of_one) >= 2 for of_one in points), "no request was evicted at two points"
    levels = [one.report["evicted_to"] for one in found]
    assert any(before > then for of_one in levels for before, then in pairwise(of_one))


@pytest.mark.parametrize("further", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_long_answers_are_served_without_preemptions(tiny: Start, further: dict[str, Any]) -> None:
    """Eight answers of 500 tokens in a pool for three: they are evicted, none is computed twice."""
    preempted = []
    for every in (0, 64):
        engine = tiny(
            "mistral",
            **_settings(
                "snapkv",
                every,
                num_gpu_blocks_override=3 * 4 * (600 // 16) + 1,
                kv_admission="prompt",
                max_num_seqs=8,
                **further,
            ),
        )
        jobs = [Job(p, greedy(500)) for p in random_prompts([100] * 8, seed=7)]
        with count_preemptions(engine) as preemptions:
            found = engine.run(jobs)
        preempted.append(preemptions["all"])
        orders = [one.report["evicted_to"] for one in found]
        totals = engine.scheduler.pyramid.pressure.totals()
        print(every, preemptions, orders, totals)
        # Includes requests that were preempted later.
        assert totals["ordered_evictions"] == sum(map(len, orders))
        assert totals["avoided_preemptions"] > 0
        assert all(len(one.token_ids) == 500 for one in found)
        engine.check_whole()
    assert preempted[0] > 0 and preempted[1] == 0
