# SPDX-License-Identifier: Apache-2.0
"""Many prompts, room for few answers: nobody is preempted, and everybody says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    count_preemptions,
    greedy,
    random_prompts,
)

pytestmark = pytest.mark.engine

PROMPT, ANSWER, REQUESTS, LAYERS = 512, 128, 12, 4


def _run(engine: Engine) -> tuple[list[Outcome], dict[str, int], int, int]:
    """The job; requests preempted, prompt tokens that were processed, most requests at once."""
    computed = most = 0
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed, most
        output = schedule(*args, **kwargs)
        computed += output.total_num_scheduled_tokens
        most = max(most, len(engine.scheduler.running))
        return output

    jobs = [Job(p, greedy(ANSWER)) for p in random_prompts([PROMPT] * REQUESTS, seed=3)]
    engine.scheduler.schedule = watched
    try:
        with count_preemptions(engine) as preemptions:
            outcomes = engine.run(jobs)
    finally:
        engine.scheduler.schedule = schedule
    engine.check_whole()
    return outcomes, preemptions, computed, most


def test_a_job_without_preemptions(
    engines: EnginePool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines.get(
        tiny_model("llama-mha"),
        kv_policy="pyramidkv",
        kv_budget="12%",
        dtype="float32",
        max_model_len=PROMPT + ANSWER,
        num_gpu_blocks_override=2 * -(-(PROMPT + ANSWER) // 16) * LAYERS + 1,
    )
    ours, preemptions, computed, most = _run(engine)
    print(f"forecast: {preemptions} preempted, {computed} tokens, {most} at once")
    assert preemptions["all"] == 0
    assert computed == REQUESTS * (PROMPT + ANSWER - 1)
    assert not engine.scheduler.pyramid.chunks.admission.table
    # As `kv_admission="prompt"` starts it (tests/scheduler), without waiting for another engine.
    monkeypatch.setattr(engine.scheduler.pyramid.chunks, "admission", None)
    stock, preemptions, computed, more = _run(engine)
    print(f"prompt: {preemptions} preempted, {computed} tokens, {more} at once")
    assert preemptions["evicted"] >= 2 and more > most >= 4
    assert computed > REQUESTS * (PROMPT + ANSWER - 1)
    assert [o.token_ids for o in ours] == [o.token_ids for o in stock]
    assert [o.report for o in ours] == [o.report for o in stock]
