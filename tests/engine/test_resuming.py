# SPDX-License-Identifier: Apache-2.0
"""Conversations that go on with an evicted state, beside other features; wrong inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine import drafts
from tests.engine.conversations import Rows, ask, talk
from tests.engine.families import make_family
from tests.engine.hybrids import SETTINGS
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    Start,
    assert_same_tokens,
    count_preemptions,
    greedy,
    is_cpu_build,
    random_prompts,
)

BLOCK, ANSWER = 16, 40
# Tokens of what a user says in each turn; one is too short for an eviction of its own.
SAID = [300, 150, 20, 90]


@pytest.mark.slow
def test_a_state_ends_anywhere_in_a_block(engines: EnginePool, tmp_path: Path) -> None:
    """Its window begins at the block's edge, before what the request saw at its own end."""
    model = make_family("gemma3", tmp_path / "gemma3")
    found = []
    for caching, asynchronous in ((False, False), (True, False), (True, True)):
        own = {"enable_prefix_caching": caching, "async_scheduling": asynchronous}
        engine = engines.get(model, **SETTINGS, **own)
        said: list[Outcome] = []
        for answer in range(ANSWER, ANSWER + BLOCK):
            _, second = talk(engine, random_prompts([200, 40], seed=answer), answer)
            whole = (200 + answer - 1) // BLOCK * BLOCK
            assert second.report["resumed_tokens"] == (whole if caching else 0)
            said.append(second)
        found.append(said)
        engine.check_whole()
    assert_same_tokens(found[1], found[0])
    assert_same_tokens(found[2], found[0])


@pytest.mark.parametrize("answer", [3, ANSWER])
def test_a_turn_whose_answer_is_not_repeated(tiny: Start, answer: int) -> None:
    """Clients cut answers or render them anew: each turn goes on from the end of the one before."""
    said, found = random_prompts(SAID, seed=4), []
    for caching, asynchronous in ((False, False), (True, False), (True, True)):
        own = {"enable_prefix_caching": caching, "async_scheduling": asynchronous}
        engine = tiny("mistral", **SETTINGS, **own)
        engine.shuffle_blocks()
        tokens: list[int] = []
        ends: list[int] = []
        turns = []
        for words in said:
            tokens = [*tokens, *words]
            turns.append(ask(engine, tokens, ends, answer))
            ends = [*ends, len(tokens)]
        # The third evicts nothing at its end, so it leaves whole blocks behind the second's.
        resumed = [turn.report["resumed_tokens"] for turn in turns]
        assert resumed == ([0, 300, 450, 464] if caching else [0] * 4)
        found.append(turns)
        engine.check_whole()
    assert_same_tokens(found[1], found[0])
    assert_same_tokens(found[2], found[0])


def _crowd(engine: Engine, look: Any, like: Sequence[Outcome] = ()) -> list[Outcome]:
    """Three turns of four conversations, side by side; one of the second turns is aborted."""
    tokens: list[list[int]] = [[]] * 4
    turns: list[list[int]] = [[]] * 4
    ended = []
    for turn, (lengths, answer) in enumerate(
        [((210, 170, 250, 190), 60), ((60, 40, 70, 50), 150), ((30, 50, 40, 60), 30)]
    ):
        said = random_prompts(list(lengths), seed=11 + turn)
        tokens = [[*before, *words] for before, words in zip(tokens, said, strict=True)]
        jobs = [
            Job(prompt, greedy(answer, logprobs=2, kv_turns=ends))
            for prompt, ends in zip(tokens, turns, strict=True)
        ]
        if turn == 1:
            jobs[1].abort_after = 20
        outcomes = engine.run(jobs, look)
        turns = [[*ends, len(prompt)] for prompt, ends in zip(tokens, turns, strict=True)]
        for index, outcome in enumerate(outcomes):
            if outcome.output is not None:
                ended.append(outcome)
                answered = like[len(ended) - 1] if like else outcome
                tokens[index] = [*tokens[index], *answered.token_ids]
    return ended


def test_who_is_preempted_or_aborted_says_the_same(engines: EnginePool, tmp_path: Path) -> None:
    """In a pool in which requests lose their blocks, answers are those of a large pool."""
    model = make_family("gemma3", tmp_path / "gemma3")
    settings = {**SETTINGS, "max_model_len": 640, "max_num_batched_tokens": 64}
    settings["kv_admission"] = "prompt"
    found: list[list[Outcome]] = []
    for blocks, caching in ((4000, False), (4000, True), (150, True)):
        own = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": caching}
        engine = engines.get(model, **settings, **own)
        look = Rows(engine) if caching else None
        with count_preemptions(engine) as preemptions:
            outcomes = _crowd(engine, look, next(iter(found), ()))
        assert (preemptions["all"] > 0) == (blocks == 150)
        assert len(outcomes) == 11
        resumed = [outcome.report["resumed_tokens"] > 0 for outcome in outcomes]
        expected = [False] * 4 + [True] * 7 if blocks == 4000 and caching else [False] * 11
        assert resumed == expected if blocks == 4000 else any(resumed)
        found.append(outcomes)
        engine.check_whole()
    assert_same_tokens(found[1], found[0])
    assert_same_tokens(found[2], found[0])


@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_drafts_of_a_model(engines, tiny_model, tmp_path, kind) -> None:
    """Greedy tokens and hits are those without drafts, and drafts are accepted behind a hit."""
    if not is_cpu_build():
        pytest.skip("this build of vLLM verifies drafts on a GPU alone")
    target = drafts.write_target(tmp_path / "target")
    write = drafts.write_eagle if kind == "eagle" else drafts.write_small_model
    head = write(tmp_path / kind, target, *([2] if kind == "draft_model" else []))
    speculation = {"method": kind, "model": str(head), "num_speculative_tokens": 3}
    found: dict[str, Any] = {}
    accepted: dict[str, int] = {}
    for name, own in {
        "alone": {"enable_prefix_caching": False},
        "miss": {"enable_prefix_caching": False, "speculative_config": speculation},
        "hit": {"speculative_config": speculation},
    }.items():
        engine = engines.get(target, **SETTINGS, **own)
        look = Rows(engine) if name == "hit" else None
        count = drafts.count_drafts(engine)
        outcomes = talk(engine, random_prompts(SAID, seed=8), ANSWER, look)
        accepted[name] = count["accepted"]
        resumed = [outcome.report.pop("resumed_tokens") for outcome in outcomes]
        said = [outcome.report.pop("resumed")["tokens"] for outcome in outcomes]
        assert said == resumed
        for turn, tokens in zip(outcomes, resumed[1:], strict=False):
            # The answer's last token may have been a draft, which is computed, too.
            whole = {(len(turn.job.prompt) + ANSWER - 1 + i) // BLOCK * BLOCK for i in (0, 1)}
            assert tokens in (whole if name == "hit" else {0})
        found[name] = [(outcome.token_ids, outcome.report) for outcome in outcomes]
        engine.check_whole()
    assert found["hit"] == found["miss"] == found["alone"]
    assert accepted["hit"] == accepted["miss"] > 10
