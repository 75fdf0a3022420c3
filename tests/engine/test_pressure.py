# SPDX-License-Identifier: Apache-2.0
"""Prompts that are evicted only when the pool lacks blocks (`--kv-evict pressure`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.support import (
    Engine,
    Job,
    Outcome,
    Start,
    count_preemptions,
    greedy,
    random_prompts,
)
from vllm_pyramid.plan import EvictionPoint
from vllm_pyramid.worker.late_evictions import _lost

LENGTHS = (300, 77, 512, 170)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_budget": "12%",
    "kv_min_tokens": 0,
    "kv_policy_args": {"window": 16},
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
}


def _jobs(count: int = 24, salt: str | None = None, **extra_args: Any) -> list[Job]:
    return [
        Job(prompt, greedy(count, logprobs=2, **extra_args), salt=salt)
        for prompt in random_prompts(LENGTHS, seed=5)
    ]


def _same(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]


@contextmanager
def _short_of(engine: Engine, missing: Callable[[int], int]) -> Iterator[None]:
    """Inside, the next steps lack `missing(step)` blocks, or as many as requests can give."""
    pressure = engine.scheduler.pyramid.pressure
    growth, steps = pressure._growth, iter(range(1 << 30))

    def grown(running: Any) -> Any:
        return growth(running) + engine.pool.get_num_free_blocks() + missing(next(steps))

    pressure._calm = 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_growth", grown), ("_spare", 0), ("_of_step", 1 << 60)):
            patch.setattr(pressure, name, value)
        yield


@pytest.mark.parametrize("policy", ["auto", "pyramidkv"])
def test_answers_are_exact_while_there_is_room(tiny: Start, policy: str) -> None:
    """No eviction, the tokens of `full`, and what follows an answer finds all of it."""
    engine = tiny("mistral", kv_policy=policy, kv_evict="pressure", **SETTINGS)
    exact = engine.run(_jobs(salt="exact", kv_policy="full"))
    found = engine.run(_jobs(salt="pressure"))
    _same(found, exact)
    for one in found:
        assert one.report["kv_evict"] == "pressure" and one.report["evicted_to"] == []
        assert one.report["evicted_tokens"] == 0
    told = [
        Job([*one.job.prompt, *one.token_ids, *range(40, 60)], greedy(3), salt=one.job.salt)
        for one in found
    ]
    for one, before in zip(engine.run(told), found, strict=True):
        assert one.cached == (len(before.job.prompt) + len(before.token_ids) - 1) // 16 * 16
    assert engine.scheduler.pyramid.reports.policy_stats()["ordered_evictions"] == 0
    engine.check_whole()


@pytest.mark.parametrize(
    ("policy", "further", "own"),
    [
        ("auto", {}, {}),
        ("snapkv", {"kv_cache_dtype": "fp8"}, {}),
        ("pyramidkv", {}, {}),
        ("pyramidkv", {}, {"kv_keep": [0, 20, 40, 60]}),
        ("streaming-llm", {"kv_policy_args": {}}, {}),
        ("keydiff", {"kv_policy_args": {"window": 16, "fill_blocks": False}}, {}),
    ],
)
def test_an_order_at_the_prompts_end_is_an_eviction_there(tiny, policy, further, own) -> None:
    """Ordered to the floor at once, requests keep and say what the policy's own schedule does."""
    settings = {**SETTINGS, "kv_policy": policy, **further}
    always = tiny("mistral", **settings).run(_jobs(**own))
    engine = tiny("mistral", **settings, kv_evict="pressure")
    engine.shuffle_blocks()
    with _short_of(engine, lambda step: 1 << 20):
        found = engine.run(_jobs(**own))
    _same(found, always)
    for one, other in zip(found, always, strict=True):
        assert one.report["kept_tokens"] == other.report["kept_tokens"]
        assert one.report["blocks_after"] == other.report["blocks_after"]
        assert one.report["evicted_after"] == [1]
        assert one.report["evicted_to"] == [other.report["kv_budget"]]
        assert 0 < one.report["lost_share"] < 1
    engine.check_whole()


@contextmanager
def _survivors(engine: Engine) -> Iterator[dict[tuple[int, int], list[torch.Tensor]]]:
    """Collect K and V of the prompt behind each order, by the request's age and layer."""
    late = engine.core.model_executor.driver_worker.worker.model_runner.pyramid.late
    compact, found = late._compact, {}
    ages: dict[str, int] = {}

    def compacted(own: Any, skip: Any, point: EvictionPoint, level: int, blocks: Any) -> Any:
        (name,) = (name for name, levels in late._requests.items() if levels.skip is skip)
        age, size = ages.setdefault(name, len(ages)), point.block_size
        left = compact(own, skip, point, level, blocks)
        for layer in own.layers.tolist():
            places = torch.arange(int(point.skip[layer]), point.computed)
            table = torch.tensor(blocks[layer])[places // size - int(skip[layer]) // size]
            caches = late._caches[own.caches][1]
            found[age, layer] = [cache[table, :, places % size].clone() for cache in caches]
        return left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "_compact", compacted)
        yield found


def test_several_orders_keep_what_one_does(tiny: Start) -> None:
    """Level after level, some tokens apart, survivors are those of the floor's eviction."""
    engine = tiny("mistral", kv_policy="pyramidkv", kv_evict="pressure", **SETTINGS)
    with _survivors(engine) as at_once, _short_of(engine, lambda step: 1 << 20):
        engine.run(_jobs(salt="a"))

    def missing(step: int) -> int:
        if step % 4 != 3:
            return -1 << 20
        return 30 if step < 20 else 1 << 20

    with _survivors(engine) as by_steps, _short_of(engine, missing):
        found = engine.run(_jobs(salt="b"))
    assert max(len(one.report["evicted_to"]) for one in found) >= 2
    for one in found:
        assert one.report["evicted_after"] == sorted(one.report["evicted_after"])
    same = [key for key in at_once if all(map(torch.equal, at_once[key], by_steps.get(key, ())))]
    assert len(by_steps) == len(at_once) and same == list(at_once)
    engine.check_whole()


@pytest.mark.parametrize(
    ("further", "headroom"),
    [
        ({}, 1),
        ({}, 1.5),
        ({"async_scheduling": True}, 1.5),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, 1.5),
    ],
    ids=["budgets", "sync", "async", "drafts"],
)
def test_a_burst_is_served_without_preemptions(tiny, further, headroom) -> None:
    """Prompts of four times the pool: evicted step by step, none is computed twice."""
    schedule = {"schedule": {"kind": "pressure", "headroom": headroom}}
    further = {**further, "kv_policy_args": {**SETTINGS["kv_policy_args"], **schedule}}
    engine = tiny(
        "mistral",
        kv_policy="snapkv",
        kv_evict="pressure",
        num_gpu_blocks_override=2 * 4 * (1024 // 16) + 1,
        **{**SETTINGS, **further},
    )
    jobs = [Job(prompt, greedy(40)) for prompt in random_prompts([400] * 12, seed=7)]
    pressure = engine.scheduler.pyramid.pressure
    orders, counts = pressure.orders, []

    def counted(running: Any, *step: Any) -> Any:
        counts.append((len(running), pressure.totals()["requests_by_level"]))
        return orders(running, *step)

    with count_preemptions(engine) as preemptions, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pressure, "orders", counted)
        found = engine.run(jobs)
    levels = [one.report["evicted_to"] for one in found]
    totals = pressure.totals()
    print(preemptions, levels, totals)
    assert preemptions["all"] == 0
    assert totals["ordered_evictions"] == sum(map(len, levels))
    assert set(totals["requests_by_level"].values()) == {0}
    assert all(sum(of_level.values()) <= running for running, of_level in counts)
    seen = {name for _, of_level in counts for name, count in of_level.items() if count}
    assert seen == {"whole", "50%", "25%", "lowest" if headroom == 1 else "headroom"}
    assert any(levels) and all(len(one.token_ids) == 40 for one in found)
    assert len({budget for one in levels for budget in one}) >= 2, "one level alone"
    engine.check_whole()


def test_what_others_share_is_left_alone(tiny: Start) -> None:
    """Two requests of one prompt keep it whole while both run, though another finds no room."""
    engine = tiny(
        "mistral",
        kv_policy="snapkv",
        kv_evict="pressure",
        num_gpu_blocks_override=4 * (640 // 16) + 1,
        **{**SETTINGS, "max_model_len": 640},
    )
    shared, other = random_prompts([400, 480], seed=9)
    exact = engine.run([Job(shared, greedy(60, logprobs=2, kv_policy="full"), salt="exact")])
    jobs = [
        Job(shared, greedy(60, logprobs=2), name="first"),
        Job(shared, greedy(40, logprobs=2), arrival=2, name="second"),
        Job(other, greedy(8), arrival=4, name="other"),
    ]
    first, second, waited = engine.run(jobs)
    assert second.report["evicted_to"] == [] and second.token_ids == exact[0].token_ids[:40]
    assert second.cached >= 368 and len(waited.token_ids) == 8
    # When the second has ended, the first has the prompt alone.
    alone = first.report["evicted_after"]
    assert alone and min(alone) >= 40
    assert first.token_ids[:40] == exact[0].token_ids[:40]
    engine.check_whole()


def test_tokens_worth_nothing_are_no_loss() -> None:
    """Scores of -inf are allowed; what they lose must be a number that JSON has."""
    scores = torch.tensor([[[9.0, -torch.inf, 1.0, 3.0, torch.nan]]])
    marks = torch.tensor([[[2, 0, 1, 2, 2]]], dtype=torch.uint8)
    batch = SimpleNamespace(policy=SimpleNamespace(sinks=0, window=1), lens=torch.tensor([5]))
    assert _lost(batch, scores, marks, 2).tolist() == [[0.0, 0.0]]  # the lowest counts as 0
    marks[0, 0, 3] = 1
    assert _lost(batch, scores, marks, 2).tolist() == [[0.0, pytest.approx(0.2)]]
    nothing = torch.full_like(scores, -torch.inf)
    assert _lost(batch, nothing, marks, 2).tolist() == [[0.0, 0.0]]
