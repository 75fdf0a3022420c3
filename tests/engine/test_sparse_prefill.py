# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: dense bits with all tiles, the same answer in any batch, no traces.

`lab/tests/test_study_sparse_prefill.py` compares it with an independent implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.sparse_prefill import (
    MODEL,
    SETTINGS,
    TILE,
    TOKENS,
    TOP_P,
    fresh,
    jobs,
    read,
    sparse,
    sparse_tokens,
    visible,
)
from tests.engine.support import (
    EnginePool,
    Job,
    Outcome,
    assert_same_tokens,
    greedy,
    random_prompts,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(MODEL)


@pytest.fixture(scope="module")
def full_runs(engines: EnginePool, model: Path) -> list[Outcome]:
    return engines.get(model, kv_policy="full", **SETTINGS).run(jobs(apart=50))


def test_with_all_tiles_it_is_full(
    engines: EnginePool, model: Path, full_runs: list[Outcome]
) -> None:
    """Chunks end elsewhere than those of `full`, so sums of matrix products may differ."""
    engine = engines.get(model, **sparse(1.0))
    engine.shuffle_blocks()
    outcomes = engine.run(jobs(apart=50))
    assert_same_tokens(outcomes, full_runs)
    for outcome in outcomes:
        assert read(outcome) == visible(len(outcome.job.prompt))
    assert sum(map(read, outcomes)) > 0
    engine.check_whole()


def test_prefixes_are_found_under_the_policy_alone(engines: EnginePool, model: Path) -> None:
    engine = fresh(engines.get(model, **sparse()))
    prompt, more = random_prompts([700, 300], seed=9)

    def run(tokens: list[int], **extra: Any) -> Outcome:
        return engine.run([Job(tokens, greedy(TOKENS, logprobs=4, **extra))])[0]

    cold, again = run(prompt), run(prompt)
    assert (cold.cached, again.cached) == (0, sparse_tokens(700)) == (0, 512)
    assert read(cold) > 0 == read(again)
    assert_same_tokens([again], [cold])
    # The end of that prompt was dense, and is computed again where it is not the end.
    longer = run([*prompt, *more])
    assert longer.cached == 512 and read(longer) > 0
    begun = run([*prompt[:200], *more])  # within a tile
    assert begun.cached == TILE
    exact = run(prompt, kv_policy="full")
    assert exact.cached == 0 and run(prompt, kv_policy="full").cached == 688
    assert exact.report["prefill_tiles_visible"] == 0
    fresh(engine)
    assert_same_tokens([run([*prompt, *more])], [longer])
    assert_same_tokens([run([*prompt[:200], *more])], [begun])
    engine.check_whole()


def test_evicting_policies_keep_what_the_window_chose(engines: EnginePool, model: Path) -> None:
    settings = sparse(kv_policy="snapkv", kv_budget="25%")
    settings["kv_policy_args"] = {
        "prefill": {"kind": "antidiagonal", "top_p": TOP_P},
        "window": 16,
    }
    engine = engines.get(model, **settings)
    engine.shuffle_blocks()
    outcomes = engine.run(jobs())
    again = engine.run(jobs())
    assert_same_tokens(again, outcomes)
    long = outcomes[-1]
    assert 0 < read(long) < visible(900) and again[-1].cached >= 5 * TILE
    assert long.report["evicted_tokens"] > 0 and max(long.report["kept_tokens"]) < 300
    engine.check_whole()
