# SPDX-License-Identifier: Apache-2.0
"""Prompts that stay whole beside an answer that is evicted from: shared, exact, and bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.engine.models import SHAPES, write_centres
from tests.engine.support import (
    Engine,
    Job,
    Models,
    assert_same_tokens,
    greedy,
    random_prompts,
)
from tests.scheduler.checks import check_pool
from vllm_pyramid.methods.r_kv.worker import RecentScores

BLOCK, BUDGET, INTERVAL, PROMPT, ANSWER = 16, 24, 16, 300, 96
# The first eviction at which a block goes: 48 generated tokens, of which 24 are to stay.
EXACT = 48
MODEL = "mistral"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_seqs": 4,
}


@pytest.fixture(params=["r-kv", "triattention", "h2o"])
def engine(request, tiny, tmp_path_factory) -> Engine:
    args: dict[str, Any] = {"interval": INTERVAL, "schedule.prompt": "keep"}
    if request.param != "h2o":
        args["window"] = 8
    if request.param == "triattention":
        args["centres"] = str(write_centres(tmp_path_factory.mktemp("centres"), SHAPES[MODEL]))
    own = {"kv_policy": request.param, "kv_budget": BUDGET, "kv_policy_args": args}
    return tiny(MODEL, **own, **SETTINGS)


def test_what_others_find_and_when_answers_change(engine: Engine) -> None:
    prompt, tail = random_prompts([PROMPT, 60], seed=4)
    whole = Job(prompt, greedy(ANSWER, logprobs=2, kv_policy="full"), salt="full")
    (full,) = engine.run([whole])

    def ask(tokens: list[int], count: int = 2, **own: Any) -> Any:
        return engine.run([Job(tokens, greedy(count, logprobs=2, **own), salt="kept")])[0]

    first = ask(prompt, ANSWER)
    assert first.cached == 0 and first.token_ids[: EXACT + 1] == full.token_ids[: EXACT + 1]
    held = first.report["kept_tokens"]
    assert all(PROMPT + BUDGET <= tokens < PROMPT + BUDGET + BLOCK for tokens in held)
    assert first.report["evicted_tokens"] > 0 and first.report["prompt_tokens"] == PROMPT
    # An evicted answer leaves its prompt in the cache, of which others find as much as of `full`.
    assert ask(prompt).cached == (PROMPT - 1) // BLOCK * BLOCK
    assert ask([*prompt, *tail]).cached == PROMPT // BLOCK * BLOCK
    assert ask(prompt[:200]).cached == 199 // BLOCK * BLOCK
    assert ask(prompt, kv_policy="full").cached == (PROMPT - 1) // BLOCK * BLOCK
    again = ask(prompt, ANSWER)
    assert_same_tokens([again], [first])
    # What is protected of a prompt that stays is there, and turns are found by their prefix.
    more = ask([*prompt, *tail], ANSWER, kv_keep=[0, 40, 50, 60], kv_turns=[PROMPT])
    assert more.report["kv_turn_mode"] == "exact" and more.report["kv_turns"] == [PROMPT, 360]
    assert more.cached >= PROMPT // BLOCK * BLOCK
    assert_same_tokens([more], [ask([*prompt, *tail], ANSWER)])
    engine.check_whole()


def test_running_requests_have_one_prompt(engine: Engine) -> None:
    """Its blocks are the same ones while each evicts from its own answer, and go with the last."""
    (prompt,) = random_prompts([PROMPT], seed=6)
    jobs = [Job(prompt, greedy(ANSWER - 20 * i, logprobs=2), i, salt="one") for i in range(3)]
    alone = [
        engine.run([replace(job, arrival=0, salt=f"alone{i}")])[0] for i, job in enumerate(jobs)
    ]
    shared, most = 0, np.zeros(engine.num_layers, np.int64)

    def look(engine: Engine) -> None:
        nonlocal shared, most
        check_pool(engine.coordinator)
        decoding = [r for r in engine.scheduler.running if r.num_output_tokens > 1]
        most = np.maximum(most, engine.coordinator.counters.held_blocks)
        for manager in engine.coordinator.layer_managers:
            fronts = {
                tuple(
                    [b.block_id for b in manager.req_to_blocks[r.request_id] if not b.is_null][
                        : PROMPT // BLOCK
                    ]
                )
                for r in decoding
            }
            assert len(fronts) <= 1, "a request has blocks of its own for the prompt"
        shared += len(decoding) > 1

    found = engine.run(jobs, look)
    assert_same_tokens(found, alone)
    assert shared > ANSWER // 2
    assert all(one.report["evicted_tokens"] > 0 for one in found)
    # The prompt once, and of each request its last block, the budget, and what comes until the
    # next eviction and until its blocks are back.
    own = -(-(PROMPT % BLOCK + BUDGET + BLOCK - 1 + INTERVAL) // BLOCK) + 2
    assert (most <= PROMPT // BLOCK + 3 * own).all(), (most, own)
    engine.check_whole()


def test_a_long_answer_is_bounded(engine: Engine) -> None:
    (prompt,) = random_prompts([60], seed=2)
    most = np.zeros(engine.num_layers, np.int64)

    def look(engine: Engine) -> None:
        nonlocal most
        most = np.maximum(most, engine.coordinator.counters.held_blocks)

    (found,) = engine.run([Job(prompt, greedy(500))], look)
    bound = -(-(len(prompt) + BUDGET + BLOCK - 1 + INTERVAL) // BLOCK) + 1
    assert len(found.token_ids) == 500 and (most <= bound).all(), (most, bound)
    assert found.report["evicted_tokens"] >= engine.num_layers * (500 - BUDGET - 2 * INTERVAL)
    engine.check_whole()


@pytest.mark.parametrize("engine", ["r-kv"], indirect=True)
def test_a_preempted_request_holds_no_slot_for_queries(engine: Engine) -> None:
    """There are as many slots as requests run at once, and it may wait while all of these run."""
    jobs = [Job(prompt, greedy(ANSWER)) for prompt in random_prompts([40, 70, 33, 50], seed=9)]
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    (queries,) = (
        hooks.queries
        for hooks in runner.pyramid.tracker.hooks.forget
        if isinstance(hooks, RecentScores)
    )
    names: list[str] = []

    def look(engine: Engine) -> None:
        if names or len(queries._slots) < len(jobs):
            return
        names.extend(queries._slots)
        assert not queries._free
        step = SchedulerOutput.make_empty()
        step.preempted_req_ids = {names[0]}
        runner.pyramid.take_messages(step, runner.kv_caches, engine.pool.num_gpu_blocks)
        assert list(queries._slots) == names[1:] and len(queries._free) == 1
        engine.client.abort_request([job.name for job in jobs])

    engine.run(jobs, look)
    assert len(names) == len(jobs)
    engine.check_whole()


def test_without_centres_the_command_is_told(tiny_model: Models) -> None:
    from vllm_pyramid import LLM

    with pytest.raises(ValueError, match=r"lab\.heads\.queries --model MODEL"):
        LLM(str(tiny_model(MODEL)), kv_policy="triattention")
