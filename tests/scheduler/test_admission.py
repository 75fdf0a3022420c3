# SPDX-License-Identifier: Apache-2.0
"""The admission rule: what it expects, that it keeps its word, and that nobody starves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.scheduler.harness import Setup, make_request
from tests.scheduler.jobs import SMALL, Job, exact_request
from vllm_pyramid.kv_cache.cache_store import RequestTerms
from vllm_pyramid.policy import load_policy
from vllm_pyramid.scheduler.admission import (
    AVERAGING_WINDOW,
    FIRST_GUESS,
    UNBOUNDED,
    Admission,
    AnswerLengths,
    answer_bounds,
)
from vllm_pyramid.scheduler.forecast import (
    RequestArrays,
    SharedBlocks,
    StagePoolView,
    StepRules,
    expected_answers,
    missing_blocks,
)

# What is expected of an answer --------------------------------------------------------------------


def test_the_mean_follows_the_answers_that_ended() -> None:
    lengths = AnswerLengths()
    assert lengths.mean == FIRST_GUESS
    for _ in range(6 * AVERAGING_WINDOW):
        lengths.add(40, cut_off=False)
    assert lengths.mean == pytest.approx(40, abs=1)
    for _ in range(6 * AVERAGING_WINDOW):
        lengths.add(300, cut_off=False)
    assert lengths.mean == pytest.approx(300, abs=3)


def test_answers_that_were_cut_off_count_as_longer_than_they_got() -> None:
    """Half end after 10 tokens, half are cut off there: with even odds at every token, 20."""
    lengths = AnswerLengths()
    for index in range(20 * AVERAGING_WINDOW):
        lengths.add(10, cut_off=index % 2 == 0)
    assert lengths.mean == pytest.approx(20, rel=0.05)
    for _ in range(
        2000 * AVERAGING_WINDOW
    ):  # none ends by itself: the weight of those that did runs out
        lengths.add(10, cut_off=True)
    assert lengths.mean > 10**9


@pytest.mark.parametrize(
    ("params", "bounds"),
    [
        ({"max_tokens": 50}, (1, 50)),
        ({"max_tokens": 5000}, (1, 36)),  # the model's length
        ({"max_tokens": 50, "min_tokens": 20}, (20, 36)),
        ({"max_tokens": 30, "ignore_eos": True}, (30, 30)),
        ({"max_tokens": 30, "ignore_eos": True, "stop_token_ids": [3]}, (1, 30)),
        ({"max_tokens": 30, "ignore_eos": True, "stop": ["."], "detokenize": True}, (1, 30)),
    ],
)
def test_bounds_of_an_answer(params: dict[str, Any], bounds: tuple[int, int]) -> None:
    request = Request("r", [1] * 60, SamplingParams(**params), None)
    longest = 110 if params["max_tokens"] == 50 and "min_tokens" not in params else 96
    assert answer_bounds(request, longest) == bounds


# The forecast ------------------------------------------------------------------------------------


def _forecast(usable: int, shared: SharedBlocks) -> int:
    """Two requests of 16 tokens each that generate 16 more, in blocks of 4 tokens."""

    def column(*values: int) -> Any:
        return np.array(values)

    requests = RequestArrays(
        prompt=column(16, 16),
        least=column(16, 16),
        most=column(16, 16),
        target=column(16, 16),
        chunk=column(64, 64),
        given_back=column(0, 0),
        bound=column(UNBOUNDED, UNBOUNDED),
        peak=column(UNBOUNDED, UNBOUNDED),
        peak_after=column(0, 0),
        computed=column(20, 0),
        in_flight=column(0, 0),
    )
    pool = StagePoolView(usable, lambda tokens: -(-tokens // 4), None, lambda: shared)
    return missing_blocks(requests, pool, StepRules(64, 0, 0, 1.0, 16.0))


def test_the_forecast_counts_what_both_hold_before_the_first_ends() -> None:
    """The first has 11 tokens to come: it ends with 8 blocks when the second has 7."""
    nothing = SharedBlocks(np.zeros(0, np.int64), np.zeros((0, 2), np.bool_), np.zeros(0, np.bool_))
    assert [_forecast(usable, nothing) for usable in (16, 15, 14, 10)] == [0, 0, 1, 5]
    both = SharedBlocks(np.array([3]), np.ones((1, 2), np.bool_), np.zeros(1, np.bool_))
    assert [_forecast(usable, both) for usable in (12, 11, 10)] == [0, 1, 2]


def _small_job(setup: Setup, requests: int, tokens: int, max_tokens: int | None = None) -> Job:
    job = Job(setup, 4 * 24 * setup.num_layers)
    for index in range(requests):
        name = f"r{index}"
        if max_tokens is None:
            job.add(exact_request(name, 64, tokens))
        else:
            job.add(make_request(name, 64, max_tokens))
    return job


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_is_thrown_out_and_the_pool_is_used(asynchronous: bool) -> None:
    """Many prompts, few of which can grow to their ends: with vLLM's rule a part comes back."""
    jobs = {}
    for admission in ("prompt", "forecast"):
        setup = replace(SMALL, admission=admission, asynchronous=asynchronous)
        jobs[admission] = job = _small_job(setup, 40, 32)
        job.finish()
        print(admission, job.preemptions, job.tokens, job.most_running, job.steps)
    stock, ours = jobs["prompt"], jobs["forecast"]
    assert stock.preemptions >= 8 and ours.preemptions == 0
    once = 40 * (64 + 32 - 1)
    assert ours.tokens == once < stock.tokens
    assert ours.most_running >= 8 and ours.steps <= 1.2 * (40 / 8) * 32  # eight at any time
    assert ours.refusals > 0
    assert ours.started == [f"r{index}" for index in range(40)]


def test_long_answers_to_short_prompts_do_not_leave_the_pool_idle() -> None:
    """Those that start together end together; who gives way to older ones has got its worth."""
    jobs = {}
    for admission in ("prompt", "forecast"):
        setup = replace(SMALL, admission=admission)
        jobs[admission] = job = Job(setup, 4 * 24 * setup.num_layers)
        for index in range(40):
            job.add(exact_request(f"r{index}", 16, 80))
        job.finish()
        print(admission, job.preemptions, job.tokens, job.most_running, job.steps)
    stock, ours = jobs["prompt"], jobs["forecast"]
    assert 0 < ours.preemptions < stock.preemptions / 2 and ours.too_soon == 0
    # Four can be together at their ends, and took 10 * 80 steps.
    assert ours.steps < 0.8 * 10 * 80


def test_max_tokens_that_nobody_uses_hold_nothing_back() -> None:
    """2,000 asked for and 8 generated: as many run at once as if 8 had been asked for."""
    setup = replace(SMALL, max_model_len=2200)
    known = _small_job(setup, 40, 8)
    known.finish()
    asked = _small_job(setup, 160, 8, max_tokens=2000)
    most = 0
    while asked.scheduler.requests:
        for request in asked.scheduler.running:
            if request.num_output_tokens >= 7:
                asked.worker.stop.add(request.request_id)
        asked.step()
        if len(asked.scheduler.requests) < 60:  # the rule has seen a hundred answers by then
            most = max(most, len(asked.scheduler.running))
    print(known.most_running, most, asked.preemptions)
    assert most >= 0.9 * known.most_running
    assert asked.preemptions <= 2


def test_a_request_that_outlives_its_expectation_is_expected_longer() -> None:
    generated = np.array([0, 100, 200, 300, 300])
    least, most = np.array([1, 1, 1, 1, 1]), np.array([50, 4000, 4000, 4000, 310])
    expected = expected_answers(FIRST_GUESS, generated, least, most)
    assert expected.tolist() == [50, FIRST_GUESS, 301, 451, 310]


def test_a_refused_request_is_looked_at_again_when_blocks_come_back() -> None:
    """And once in a while; the steps between cost nothing."""
    job = _small_job(SMALL, 12, 32)
    looks, admission = 0, job.admission
    lacking = admission.missing_blocks

    def counting(*args: Any) -> int:
        nonlocal looks
        looks += 1
        return lacking(*args)

    admission.missing_blocks = counting  # type: ignore[method-assign]
    job.finish()
    # Each request is evicted and ends, and starts after a look that says yes.
    assert job.refusals > looks
    assert looks <= 3 * 12


def test_a_refused_request_waits_as_if_blocks_were_missing() -> None:
    """It stays first, nobody overtakes it, and what vLLM pinned for it is let go again (by vLLM,
    where blocks are missing)."""
    job = _small_job(SMALL, 3, 8)
    scheduler, admission = job.scheduler, job.admission
    asked: list[str] = []

    def admits(request: Any, *_: Any) -> bool:
        asked.append(request.request_id)
        return request.request_id != "r0"

    admission.admits = admits  # type: ignore[method-assign]
    for _ in range(2):
        assert not scheduler.schedule().num_scheduled_tokens
        assert [request.request_id for request in scheduler.waiting] == ["r0", "r1", "r2"]
        assert scheduler.coordinator.blocked_request is None  # the refusal was for that step alone
    assert asked == ["r0", "r0"]
    admission.admits = lambda *_: True  # type: ignore[method-assign]
    assert "r0" in scheduler.schedule().num_scheduled_tokens


def _entered(policy: str, prompt: int, generated: int, **arguments: Any) -> RequestArrays:
    """Return the numbers of a request that has generated some tokens, under a policy."""
    scheduler = _small_job(SMALL, 1, 8).scheduler
    coordinator = scheduler.coordinator
    admission = Admission(
        coordinator, max_model_len=10**5, step_tokens=10**4, longest_chunk=10**4, lag=0
    )
    plan = load_policy(policy, "100%" if policy == "pyramidinfer" else 64, arguments).plan(
        prompt, coordinator.layer_blocks.num_tables, 4
    )
    request = exact_request("long", prompt, 10**4)
    request.append_output_token_ids([8] * generated)
    coordinator.plans.add("long", RequestTerms(plan))
    admission.enter(request, plan)
    return admission.table.arrays(["long"], np.array([0]), np.array([0]), 0)


def test_the_rest_of_a_prompt_in_pieces_is_not_its_chunk() -> None:
    assert _entered("pyramidinfer", 2 * 128 + 1, 0, piece_tokens=128).chunk == 128


def test_one_that_evicted_while_it_generated_comes_back_without_its_history() -> None:
    numbers = _entered("h2o", 100, 3000)
    target, peak = int(numbers.target[0]), int(numbers.peak[0])
    layers, block_size = SMALL.num_layers, SMALL.block_size
    assert target == 3100 and 100 * layers <= peak * block_size < 400 * layers
    assert _entered("pyramidkv", 100, 3000).peak == UNBOUNDED


def test_answers_that_orders_may_evict_count_as_far_as_they_stay() -> None:
    """Half more than 64 tokens, and those since the last point; all of them at a restart."""
    args = {"window": 8, "schedule": "pressure"}
    alone = _entered("snapkv", 100, 3000, **args)
    numbers = _entered("snapkv", 100, 3000, **args, **{"schedule.answers": 200})
    layers, block_size = SMALL.num_layers, SMALL.block_size
    assert alone.bound == UNBOUNDED
    assert 296 * layers <= int(numbers.bound[0]) * block_size <= (296 + 3 * block_size) * layers
    assert numbers.peak == alone.peak == UNBOUNDED and numbers.given_back == alone.given_back
