# SPDX-License-Identifier: Apache-2.0
"""Conversations of models with layers that do not evict: windows, chunks, a draft model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine import drafts
from tests.engine.conversations import FourTurns, Rows, four_turns, talk
from tests.engine.families import make_family
from tests.engine.hybrids import FAMILIES, SETTINGS, make_hybrid
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    assert_same_tokens,
    count_preemptions,
    greedy,
    is_compiled,
    is_cpu_build,
    random_prompts,
)

pytestmark = pytest.mark.engine

BLOCK, ANSWER = 16, 40
# Tokens of what a user says in each turn; one is too short for an eviction of its own.
SAID = [300, 150, 20, 90]


@pytest.mark.parametrize(("family", "compiled"), FAMILIES)
def test_tokens_and_what_is_kept_are_those_without_it(
    engines: EnginePool, tmp_path: Path, family: str, compiled: bool
) -> None:
    """Hits change neither tokens nor reports nor what is kept."""
    model = make_hybrid(family, tmp_path)
    found: list[FourTurns] = []
    for caching in (True, False):
        folder = tmp_path / str(caching)
        own = {"enable_prefix_caching": caching, "kv_trace": str(folder)}
        engine = engines.get(model, enforce_eager=not compiled, **SETTINGS, **own)
        assert is_compiled(engine) == compiled
        engine.shuffle_blocks()
        look = Rows(engine) if caching else None
        like = next(iter(found), None)
        found.append(four_turns(engine, folder, SAID, hits=caching, on_step=look, like=like))
        engine.check_whole()
    found[0].check_same(found[1])


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


def test_what_does_not_go_on_is_a_miss(engines: EnginePool, tmp_path: Path) -> None:
    """Other tokens, another budget, other turns: the state before, the prompt, or nothing."""
    model = make_family("gemma3", tmp_path / "gemma3")
    engine = engines.get(model, **{**SETTINGS, "max_num_batched_tokens": 512})
    assert engine.llm.reset_prefix_cache()
    look = Rows(engine)
    _, second = talk(engine, random_prompts([300, 120], seed=5), ANSWER)
    said = [*second.job.prompt, *second.token_ids]
    turns = second.report["kv_turns"]
    (more,) = random_prompts([70], seed=6)

    def cached(tokens: list[int], **own: Any) -> int:
        (outcome,) = engine.run([Job(tokens, greedy(2, **own))], look)
        return outcome.cached

    of_first, of_second = 339 // BLOCK * BLOCK, (460 + 39) // BLOCK * BLOCK
    exact = (300 - 8) // BLOCK * BLOCK
    assert turns == [300, 460]
    assert cached([*said, *more], kv_turns=turns) == of_second
    assert cached([*said, *more], kv_turns=turns, kv_budget=80) == exact
    assert cached([*said, *more], kv_turns=[300]) == of_first
    assert cached([*said, *more], kv_turns=[300, 470]) == of_first
    assert cached([*said, *more]) == 300 // BLOCK * BLOCK, "it says nothing of a conversation"
    # A template that writes the answer in another way, from its 20th token on.
    other = [*second.job.prompt, *second.token_ids[:20], *more, *more]
    assert cached(other, kv_turns=turns) == 480
    assert cached([*said[:10], *more, *said], kv_turns=turns) == 0
    assert engine.llm.reset_prefix_cache()
    assert cached([*said, *more], kv_turns=turns) == 0
    engine.check_whole()


def _crowd(engine: Engine, look: Any, like: Sequence[Outcome] = ()) -> list[Outcome]:
    """Three turns of four conversations, side by side; one of the second turns is aborted.

    Args:
        like: what came of it in another engine, whose answers these turns go on from.
    """
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
def test_drafts_of_a_model(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
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
        for turn, tokens in zip(outcomes, resumed[1:], strict=False):
            # The answer's last token may have been a draft, which is computed, too.
            whole = {(len(turn.job.prompt) + ANSWER - 1 + i) // BLOCK * BLOCK for i in (0, 1)}
            assert tokens in (whole if name == "hit" else {0})
        found[name] = [(outcome.token_ids, outcome.report) for outcome in outcomes]
        engine.check_whole()
    assert found["hit"] == found["miss"] == found["alone"]
    assert accepted["hit"] == accepted["miss"] > 10
