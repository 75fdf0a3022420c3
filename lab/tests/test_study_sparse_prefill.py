# SPDX-License-Identifier: Apache-2.0
"""The engine's sparse prefill against an independent implementation.

It is that of `lab/method_study/sparse_prefill.py`: Transformers with its attention function
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lab.tests.study_scripts import study_scripts
from tests.engine.sparse_prefill import (
    DENSE_LAST,
    MODEL,
    SETTINGS,
    TILE,
    TOP_P,
    fresh,
    jobs,
    read,
    sparse,
    sparse_tokens,
    visible,
)
from tests.engine.support import EnginePool, Outcome

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(MODEL)


@pytest.fixture(scope="module")
def full_runs(engines: EnginePool, model: Path) -> list[Outcome]:
    return engines.get(model, kv_policy="full", **SETTINGS).run(jobs(apart=50))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Callable[[list[int]], torch.Tensor]]:
    """Log probabilities of the token behind a prompt, by the study's sparse prefill."""
    names = ("model", "gates_tiles", "sparse_prefill")
    also = ("code_task", "instruction_task", "own_tasks")
    with study_scripts(names, also) as modules:
        script, of_model = modules["sparse_prefill"], modules["model"].Model(model)
        assert (script.DENSE_LAYERS, script.LAST) == (2, DENSE_LAST)
        yield lambda ids: script.last_logits(of_model, ids, TOP_P, together=True)[0][-1]


def test_an_independent_implementation_gives_its_probabilities(
    engines: EnginePool,
    model: Path,
    full_runs: list[Outcome],
    oracle: Callable[[list[int]], torch.Tensor],
) -> None:
    engine = engines.get(model, **sparse())
    outcomes = fresh(engine).run(jobs())
    differ = 0
    for outcome, dense in zip(outcomes, full_runs, strict=True):
        prompt = outcome.job.prompt
        if not sparse_tokens(len(prompt)):
            assert read(outcome) == 0 and outcome.token_ids == dense.token_ids
            continue
        right = oracle(prompt)
        for token, ours in outcome.logprobs[0].items():
            assert ours == pytest.approx(float(right[token]), abs=2e-4), len(prompt)
        if sparse_tokens(len(prompt)) > 2 * TILE:  # two tiles are the first and the diagonal
            assert read(outcome) < visible(len(prompt)), "silently dense"
            both = outcome.logprobs[0].keys() & dense.logprobs[0].keys()
            differ += any(abs(outcome.logprobs[0][t] - dense.logprobs[0][t]) > 1e-3 for t in both)
    assert differ == 2
    engine.check_whole()
