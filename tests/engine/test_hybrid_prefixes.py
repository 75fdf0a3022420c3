# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of hybrid models: windows and chunks are found with what the other layers hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conversations import Rows, cached_tokens, conversation, run_waves, traces
from tests.engine.families import make_family
from tests.engine.hybrids import FAMILIES, SETTINGS, make_hybrid
from tests.engine.support import (
    EnginePool,
    Job,
    Outcome,
    assert_same_tokens,
    greedy,
    is_compiled,
    random_prompts,
)

pytestmark = pytest.mark.engine

BLOCK, WINDOW = 16, 8


@pytest.mark.parametrize(("family", "compiled"), FAMILIES)
def test_tokens_and_what_is_kept_are_those_without_it(
    engines: EnginePool, tmp_path: Path, family: str, compiled: bool
) -> None:
    model = make_hybrid(family, tmp_path)
    answered: dict[bool, list[Outcome]] = {}
    results = {}
    for caching in (True, False):
        folder = tmp_path / str(caching)
        engine = engines.get(
            model,
            **SETTINGS,
            enable_prefix_caching=caching,
            kv_trace=str(folder),
            enforce_eager=not compiled,
        )
        assert is_compiled(engine) == compiled
        engine.shuffle_blocks()
        look = Rows(engine) if caching else None
        outcomes = run_waves(engine, conversation(), look)
        outcomes = [outcome for outcome in outcomes if outcome.output is not None]
        answered[caching] = outcomes
        results[caching] = (
            [outcome.report for outcome in outcomes],
            traces(folder, outcomes),
            cached_tokens(outcomes),
        )
        if look is not None:
            assert look.most > 20
    assert_same_tokens(answered[True], answered[False])
    with_it, without = results[True], results[False]
    assert with_it[0] == without[0]
    assert with_it[1] == without[1] and any(with_it[1])
    assert not any(without[2])
    assert sum(cached > 0 for cached in with_it[2]) >= 6, with_it[2]


def test_hits_are_as_long_as_they_can_be(engines: EnginePool, tmp_path: Path) -> None:
    """All that was computed, but for the queries that score, wherever the prompts part."""
    engine = engines.get(make_family("gemma3", tmp_path / "gemma3"), **SETTINGS)
    prompt, other, more = random_prompts([500, 500, 300], seed=1)
    look = Rows(engine)

    def cached(tokens: list[int], **extra: Any) -> int:
        (outcome,) = engine.run([Job(tokens, greedy(4, **extra))], look)
        return outcome.cached

    assert cached(prompt) == 0
    assert cached(prompt) == (500 - WINDOW) // BLOCK * BLOCK == 480
    assert cached(prompt, kv_budget=200) == 480
    assert cached(prompt, kv_policy="full") == 496
    assert cached(prompt[:300]) == (300 - WINDOW) // BLOCK * BLOCK
    assert cached([*prompt, *more]) == 496
    assert cached([*prompt[:400], *other]) == 400
    assert cached(other) == 0, "it never began with these tokens"
    assert engine.llm.reset_prefix_cache()
    assert cached(prompt) == 0
    engine.check_whole()


def test_windows_are_found_while_their_request_runs(engines: EnginePool, tmp_path: Path) -> None:
    """The same prompt, and a longer one, while the first request still looks at its window."""
    engine = engines.get(make_family("gemma3", tmp_path / "gemma3"), **SETTINGS)
    look = Rows(engine)
    prompt, more = random_prompts([500, 100], seed=2)
    alone = engine.run(
        [
            Job(prompt, greedy(20, logprobs=2)),
            Job([*prompt, *more], greedy(8, logprobs=2), arrival=200),
        ]
    )
    assert engine.llm.reset_prefix_cache()
    jobs = [
        Job(prompt, greedy(20, logprobs=2)),
        Job(prompt, greedy(20, logprobs=2), arrival=6),
        Job([*prompt, *more], greedy(8, logprobs=2), arrival=7),
    ]
    outcomes = engine.run(jobs, look)
    assert cached_tokens(outcomes) == [0, 480, 496]
    assert_same_tokens(outcomes, [alone[0], alone[0], alone[1]])
    engine.check_whole()
