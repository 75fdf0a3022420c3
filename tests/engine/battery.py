# SPDX-License-Identifier: Apache-2.0
"""What holds for every policy, on one engine that is running (`bench.py`): answers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.bench import SALTS, Bench, edge_jobs, fresh, small_pool, step_tokens, whole_blocks
from tests.engine.conversations import Rows
from tests.engine.matrix import BLOCK, WHOLE
from tests.engine.oracles import check_evictions, check_log_probabilities, held_at_evictions
from tests.engine.support import (
    Engine,
    Job,
    Outcome,
    assert_same_tokens,
    count_preemptions,
    greedy,
    random_prompts,
)

# What is left out, and what is not -------------------------------------------------------------


def _check_bits(bench: Bench, **own: Any) -> None:
    found = bench.engine.run(edge_jobs(**own))
    whole = bench.full or bench.engine.run(edge_jobs(**WHOLE))
    for one, other in zip(found, whole, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs  # floats, bit for bit
        assert one.report["evicted_tokens"] == 0
        assert one.report["kept_tokens"] == other.report["kept_tokens"] or bench.full


def a_budget_beyond_the_prompt_is_full(bench: Bench) -> None:
    _check_bits(bench, **bench.case.beyond or {})


def opting_out_is_full(bench: Bench) -> None:
    _check_bits(bench, **WHOLE)


def a_floor_beyond_the_prompt_is_full(bench: Bench) -> None:
    """Prompts up to the floor keep everything, longer ones the floor at least."""
    others = {key: value for key, value in bench.case.beyond.items() if key != "kv_budget"}
    _check_bits(bench, kv_min_tokens=4096, **others)
    floor = 256
    for one in bench.engine.run(bench.jobs(kv_min_tokens=floor)):
        n, share = len(one.job.prompt), int(bench.policy.budget.value[:-1])
        assert one.report["kv_min_tokens"] == floor
        assert one.report["kv_budget"] == min(max(floor, -(-n * share // 100)), n)
        assert (one.report["evicted_tokens"] > 0) == (n > floor + BLOCK)


def it_bites(bench: Bench) -> None:
    """Long prompts lose tokens or are read in part, so the other properties compare something."""
    whole = bench.engine.run(bench.jobs(**WHOLE))
    for one, other in zip(bench.alone, whole, strict=True):
        if len(one.job.prompt) < 130:
            continue
        assert (one.report["evicted_tokens"] > 0) == bench.case.evicts
        gaps = [
            abs(a[token] - b[token])
            for a, b in zip(one.logprobs, other.logprobs, strict=True)
            for token in a.keys() & b.keys()
        ]
        assert max(gaps, default=0.0) > 1e-2 or one.token_ids != other.token_ids
        if bench.case.exact:  # the prompt attends to all of itself
            assert_same_tokens([_first(one)], [_first(other)])


def _first(outcome: Outcome) -> Outcome:
    """Return an outcome that has the first token alone."""
    output = outcome.output
    (completion,) = output.outputs
    short = replace(
        completion, token_ids=completion.token_ids[:1], logprobs=list(completion.logprobs)[:1]
    )
    return Outcome(outcome.job, outcome.request_id, SimpleNamespace(outputs=[short]))


# The oracle ------------------------------------------------------------------------------------


def decode_attends_to_what_was_kept(bench: Bench) -> None:
    """At every eviction the best stay, by Transformers' keys; decoding sees them alone."""
    jobs = [replace(job, arrival=2 * i) for i, job in enumerate(bench.jobs())]
    evicted = 0
    with step_tokens(bench.engine, max(100, bench.case.least_step)):
        outcomes = bench.engine.run(jobs)
    for outcome in outcomes:
        prompt = outcome.job.prompt
        held = (
            held_at_evictions(bench.folder, outcome, bench.engine.kv_heads)
            if bench.case.evicts
            else {}
        )
        tokens = [*prompt, *outcome.token_ids[:-1]]
        rows = bench.model.decode(tokens, held)[len(prompt) - 1 :]
        check_log_probabilities(rows, outcome)
        if bench.case.best:
            evicted += check_evictions(bench.policy, bench.engine, bench.model, outcome, held)
    assert evicted > 500 or not bench.case.best


# Invariance ------------------------------------------------------------------------------------


def order_of_arrival_changes_nothing(bench: Bench) -> None:
    """All at once, the last one first, and one by one among those that decode."""
    engine = bench.engine
    engine.shuffle_blocks()
    bench.check_same(engine.run(bench.jobs()[::-1], bench.look)[::-1], bench.alone)
    late = [replace(job, arrival=3 * i) for i, job in enumerate(bench.jobs())]
    bench.check_same(engine.run(late), bench.alone)


def chunks_change_nothing(bench: Bench) -> None:
    with step_tokens(bench.engine, bench.case.least_step):
        jobs = [replace(job, arrival=i) for i, job in enumerate(bench.jobs())]
        bench.check_same(bench.engine.run(jobs, bench.look), bench.alone)


def settings_of_requests_mix_in_a_batch(bench: Bench) -> None:
    lengths, tokens = (140, 420), bench.case.tokens if bench.keeps_prompts else 6
    jobs = [job for own in bench.settings() for job in bench.jobs(lengths, tokens, **own)]
    alone = [bench.engine.run([job])[0] for job in jobs]
    bench.check_same(bench.engine.run(fresh(jobs)), alone)
    kept = {str(one.report["kept_tokens"]) for one in alone if len(one.job.prompt) == 420}
    assert (len(kept) > 1) == bench.case.evicts


TAILS = (260, 17, 220, 5, 170, 90, 1, 120, 33, 200, 64, 150)


def preempted_is_not_preempted(bench: Bench) -> None:
    """In a pool for the longest of many, in which all start that fit."""
    engine = bench.engine
    tokens = max(60, 2 * engine.block_size)
    trunk, *tails = random_prompts((40, *TAILS), seed=6)
    own = itertools.cycle(bench.settings()[:2])
    jobs = [Job([*trunk, *tail], greedy(tokens, logprobs=2, **next(own))) for tail in tails]
    expected = engine.run(fresh(jobs))
    salt = f"preempted{next(SALTS)}"
    watch = Rows(engine) if bench.watches else bench.look
    with small_pool(engine, whole_blocks(bench, 300 + tokens)):
        engine.shuffle_blocks()
        jobs = [replace(job, name=f"{salt}{i}", salt=salt) for i, job in enumerate(jobs)]
        jobs[-2:] = replace(jobs[-2], abort_after=9), replace(jobs[-1], abort_after=25)
        with count_preemptions(engine) as preemptions:
            found = engine.run(jobs, watch)
        assert preemptions["all"] > 0, preemptions
    bench.check_same(found[:-2], expected[:-2], again=True)


def aborted_anywhere_leaves_nothing(bench: Bench) -> None:
    """While waiting, inside a prompt, at its end and after each of some tokens."""
    engine = bench.engine
    whole = bench.jobs((300,))[0]
    (alone,) = engine.run([whole])
    with step_tokens(engine, max(100, bench.case.least_step)):
        jobs = [
            replace(job, abort_after=index) for index, job in enumerate(bench.jobs((300,) * 12, 30))
        ]
        outcomes = engine.run([*jobs, *fresh([whole])], bench.look)
    assert [one.output is None for one in outcomes] == [True] * 12 + [False]
    bench.check_same(outcomes[-1:], [alone])


def sleep_changes_nothing(bench: Bench) -> None:
    """`sleep(1, mode="keep")` drops the cache under running requests: all is computed again."""
    engine, steps = bench.engine, itertools.count(1)
    worker = engine.core.model_executor.driver_worker.worker
    slept = []

    def sleep(engine: Engine) -> None:
        if next(steps) not in (3, 9, 10):
            return
        engine.core.sleep(1, mode="keep")
        for cache in worker.model_runner.kv_caches:
            cache.fill_(torch.nan)
        for hooks in worker.model_runner.pyramid.tracker.hooks:
            if (pages := getattr(hooks, "pages", None)) is not None:
                pages.fill_(torch.nan)
        slept.append(len(engine.scheduler.waiting))
        assert not engine.coordinator.counters.held_blocks.any()
        engine.core.wake_up()

    bench.check_same(engine.run(bench.jobs(), sleep), bench.alone, again=True)
    assert len(slept) == 3 and min(slept) > 0
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
