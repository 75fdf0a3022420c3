# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: dense bits with all tiles, another implementation's answer with some, no traces.

The independent implementation is that of `scripts/method_study/sparse_prefill.py`: Transformers
with its attention function replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    assert_same_tokens,
    count_preemptions,
    greedy,
    random_prompts,
)
from tests.tools.eval.study_scripts import study_scripts

pytestmark = pytest.mark.engine

MODEL, LAYERS, KV_HEADS, TILE = "qwen3", 4, 2, 128
TOP_P, DENSE_LAST = 0.5, 64
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
}
LENGTHS = (5, 192, 191, 700, 321, 900)
TOKENS = 8


def sparse(top_p: float = TOP_P, **changes: Any) -> dict[str, Any]:
    return {
        "kv_policy": "sparse-prefill",
        "kv_policy_args": {"prefill": {"top_p": top_p}},
        **SETTINGS,
        **changes,
    }


def jobs(lengths: tuple[int, ...] = LENGTHS, apart: int = 1, **extra_args: Any) -> list[Job]:
    """Some meet requests that decode, or come in chunks."""
    return [
        Job(prompt, greedy(TOKENS, logprobs=4, **extra_args), arrival=index * apart)
        for index, prompt in enumerate(random_prompts(lengths, seed=8))
    ]


def sparse_tokens(prompt: int) -> int:
    return max(prompt - DENSE_LAST, 0) // TILE * TILE


def visible(prompt: int, cached: int = 0) -> int:
    """Pairs of tiles in all layers and KV heads, by arithmetic."""
    first, last = cached // TILE, sparse_tokens(prompt) // TILE
    return LAYERS * KV_HEADS * sum(range(first + 1, last + 1))


def read(outcome: Outcome) -> int:
    found = outcome.report["prefill_tiles_read"]
    seen = visible(len(outcome.job.prompt), outcome.cached)
    assert outcome.report["prefill_tiles_visible"] == seen
    assert 0 <= found <= seen
    return int(found)


def _fresh(engine: Engine) -> Engine:
    assert engine.llm.reset_prefix_cache()
    return engine


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
    outcomes = _fresh(engine).run(jobs())
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


def test_chunks_neighbours_and_preemptions_change_nothing(engines: EnginePool, model: Path) -> None:
    engine = engines.get(model, **sparse())
    alone = _fresh(engine).run(jobs(apart=50))
    together = _fresh(engine).run(jobs(apart=0)[::-1])[::-1]
    assert_same_tokens(together, alone)
    small = engines.get(
        model,
        **sparse(max_num_batched_tokens=200, max_num_seqs=4, num_gpu_blocks_override=100 * LAYERS),
        enable_prefix_caching=False,
        kv_admission="prompt",
    )
    lengths = (300, 600, 700, 500)
    with count_preemptions(small) as preempted:
        cut = small.run(jobs(lengths, apart=0))
    whole = engines.get(model, **sparse(max_num_batched_tokens=1024)).run(jobs(lengths, apart=50))
    assert_same_tokens(cut, whole)
    if not preempted["all"]:
        assert list(map(read, cut)) == list(map(read, whole))


def test_prefixes_are_found_under_the_policy_alone(engines: EnginePool, model: Path) -> None:
    engine = _fresh(engines.get(model, **sparse()))
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
    _fresh(engine)
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
