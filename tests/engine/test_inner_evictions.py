# SPDX-License-Identifier: Apache-2.0
"""Evictions inside the prompt: what is kept, what is held, and that the pool may be small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.chunked_paper import ChunkedModel, Scoring
from tests.engine.heavy_hitters import check_log_probabilities
from tests.engine.paper import arithmetic_budgets
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    count_preemptions,
    greedy,
    kept_at_evictions,
    random_prompts,
)

pytestmark = pytest.mark.engine

BLOCK = 16
MAX_TOKENS = 12


@dataclass(frozen=True)
class Case:
    """A policy that evicts inside the prompt, as the oracle knows it."""

    policy: str
    inner: Scoring
    last: Scoring
    args: dict[str, Any] = field(default_factory=dict)
    tokens: int = 64
    keep: int = 48
    budget: int = 40


WINDOW = Scoring("window", 8)
CASES = {
    "snapkv": Case("snapkv", WINDOW, WINDOW),
    "pyramidkv": Case("pyramidkv", WINDOW, WINDOW, tokens=80, keep=80),
    "pyramidkv, a longer window inside": Case(
        "pyramidkv", Scoring("window", 24), WINDOW, {"chunk.window": 24}, tokens=64, keep=64
    ),
    "snapkv, keydiff inside": Case(
        "snapkv",
        Scoring("keydiff", 16),
        WINDOW,
        {"chunk.scorer": "keydiff", "chunk.window": 16},
    ),
    "snapkv, sums inside": Case(
        "snapkv", Scoring("sum", 8), WINDOW, {"chunk.scorer": "accumulated_attention"}
    ),
    "keydiff": Case(
        "keydiff", Scoring("keydiff", 4, 4), Scoring("keydiff", 4, 4), {"window": 4, "sinks": 4}
    ),
    "h2o": Case(
        "h2o",
        Scoring("sum", 0, recent=24),
        Scoring("sum", 0, recent=20),
        {"schedule": "prompt_end"},
    ),
}


def _args(case: Case) -> dict[str, Any]:
    own = {"chunk.tokens": case.tokens, "chunk.keep": case.keep, "chunk.scorer": None}
    return {**own, **case.args}


def _settings(case: Case, **settings: Any) -> dict[str, Any]:
    return {
        "kv_policy": case.policy,
        "kv_budget": case.budget,
        "kv_policy_args": _args(case),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        **settings,
    }


def _points(case: Case, prompt_len: int) -> list[int]:
    """Where it is to evict: multiples of E beyond what is kept, a window before the end; n."""
    behind = max(case.last.window, 2)
    inner = range(case.tokens, prompt_len - behind + 1, case.tokens)
    return [point for point in inner if point - max(case.keep, case.budget) >= BLOCK] + [prompt_len]


def _check_held(case: Case, point: int, prompt_len: int, held: list[int]) -> None:
    """Equal lengths or the pyramid's, of `keep` tokens, whole blocks given back."""
    inside = point < prompt_len
    mean = max(case.keep, case.budget) if inside else case.budget
    window = case.inner.window if inside else case.last.window
    curve = [float(mean)] * len(held)
    if case.policy == "pyramidkv":
        of_window = arithmetic_budgets(mean - window, len(held), point - window, 20.0)
        curve = [window + length for length in of_window]
    for length, wanted in zip(held, curve, strict=True):
        possible = {point - (point - k) // BLOCK * BLOCK for k in (int(wanted), int(wanted) + 1)}
        assert length in possible, (point, held, curve)


@pytest.mark.parametrize("name", CASES)
def test_kept_tokens_at_every_point(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Two query heads a KV head, chunks of 50 tokens, blocks in random order, mixed batches."""
    case, path = CASES[name], tiny_model("mistral")
    engine = engines.get(path, **_settings(case, kv_trace=str(tmp_path), max_num_batched_tokens=50))
    engine.shuffle_blocks()
    model = ChunkedModel(str(path), case.inner, case.last)
    lengths = [401, 96, 262, 64 * 5 + 8, 64 * 4 + 7]
    for arrivals in ([0] * 5, [0, 1, 3, 5, 12]):
        jobs = [
            Job(prompt, greedy(MAX_TOKENS, logprobs=1), arrival=arrival)
            for prompt, arrival in zip(random_prompts(lengths, seed=11), arrivals, strict=True)
        ]
        for outcome in engine.run(jobs):
            n, kept = len(outcome.job.prompt), kept_at_evictions(tmp_path, outcome)
            assert list(kept) == _points(case, n)
            for point, layers in kept.items():
                _check_held(case, point, n, [len(rows[0]) for rows in layers])
            tokens = outcome.job.prompt + outcome.token_ids[:-1]
            check_log_probabilities(model.walk(tokens, n, kept)[n - 1 :], outcome)
            assert outcome.report["inner_evictions"] == len(kept) - 1 >= (n > 128)
            assert outcome.report["kept_tokens"] == [len(rows[0]) for rows in kept[n]]
    engine.check_whole()
    found = model.found
    print(f"{found.points} choices, {found.different} of {found.kept} kept tokens differ")
    assert not found.problems, found.problems[:5]
    assert found.points > 200 and found.different <= 0.002 * found.kept


def _jobs(lengths: list[int], seed: int = 5) -> list[Job]:
    return [Job(p, greedy(MAX_TOKENS), i) for i, p in enumerate(random_prompts(lengths, seed=seed))]


def test_points_behind_the_prompt_change_nothing(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """E of at least the prompt: the tokens, reports and traces of the policy without it."""
    found = []
    for tokens in (0, 512):
        folder = tmp_path / str(tokens)
        engine = engines.get(
            tiny_model("mistral"),
            kv_policy="pyramidkv",
            kv_budget=40,
            kv_policy_args={"chunk": {"tokens": tokens}},
            kv_trace=str(folder),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=50,
            max_num_seqs=8,
        )
        outcomes = engine.run(_jobs([130, 401, 515]))
        kept = []
        for outcome in outcomes:
            assert outcome.report.pop("inner_evictions", 0) == 0
            (path,) = folder.glob(f"{outcome.request_id}*.npz")
            with np.load(path) as file:
                arrays = {name: file[name].tolist() for name in file if name != "request_id"}
            kept.append((outcome.token_ids, outcome.report, arrays))
        found.append(kept)
    assert repr(found[0]) == repr(found[1])


# One that takes ten times the pool, a short one, one whose peak is the pool.
LONG = [5000, 100, 700]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "h2o"])
def test_a_prompt_of_ten_pools(
    engines: EnginePool, tiny_model: Callable[[str], Path], name: str, asynchronous: bool
) -> None:
    """The pool is exactly what one prompt holds at most; the answers are those of a large one."""
    case, layers = CASES[name], 4
    from vllm_pyramid.policy import load_policy
    from vllm_pyramid.policy.planning import peak_blocks_up_to

    policy = load_policy(case.policy, case.budget, _args(case))
    peak = int(peak_blocks_up_to(policy, 6000, layers, BLOCK).sum())
    assert peak * BLOCK <= layers * (case.tokens + max(case.keep, case.budget) + 3 * BLOCK)
    settings = _settings(
        case,
        max_model_len=6000,
        hf_overrides={"max_position_embeddings": 6000},
        max_num_batched_tokens=100,
        async_scheduling=asynchronous,
    )
    found = []
    for blocks in (layers * 6000 // BLOCK, peak):
        engine = engines.get(tiny_model("mistral"), **settings, num_gpu_blocks_override=blocks + 1)
        most = 0

        def look(engine: Engine) -> None:
            nonlocal most
            for request in engine.scheduler.running:
                most = max(most, sum(engine.coordinator.blocks_held(request.request_id)))

        with count_preemptions(engine) as preemptions:
            outcomes = engine.run(_jobs(LONG), look, max_steps=2000)
        engine.check_whole()
        found.append([(outcome.token_ids, outcome.report) for outcome in outcomes])
        late = 100 // BLOCK + 1 if asynchronous else 0
        assert peak - 2 * layers <= most <= peak + layers * late
        assert most <= blocks and preemptions["all"] < 20
    assert found[0] == found[1]
    assert [report["inner_evictions"] > 3 for _, report in found[0]] == [True, False, True]


def test_a_scorer_inside_gets_the_rotary_embedding(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Expected Attention at points, with SnapKV at the end: it undoes the rotation of queries."""
    from vllm_pyramid.methods.expected_attention import ExpectedAttentionScorer

    engine = engines.get(
        tiny_model("mistral"),
        **_settings(Case("snapkv", WINDOW, WINDOW, {"chunk.scorer": "expected_attention"})),
    )
    seen, score = [], ExpectedAttentionScorer.score

    def watched(self: Any, view: Any) -> torch.Tensor:
        seen.append((view.rotary is not None, view.whole, view.last_position + 1))
        return score(self, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpectedAttentionScorer, "score", watched)
        engine.run(_jobs([300]))
    assert seen and all(rotary for rotary, _, _ in seen)
    assert {point for _, _, point in seen} == {64, 128, 192, 256}
    assert all(whole == (point == 64) for _, whole, point in seen)


def test_prefixes_are_shared_up_to_the_first_point(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """The same prompts again, longer and with other budgets: what is found changes nothing."""
    case = CASES["snapkv"]
    first, other = random_prompts([400, 400], seed=21)
    prompts = [first, first, [*first[:250], *other], [*first[:50], *other], first]
    found, cached = [], []
    for caching in (False, True):
        engine = engines.get(
            tiny_model("mistral"),
            **_settings(case, max_num_batched_tokens=100, enable_prefix_caching=caching),
        )
        of_caching = []
        for index, prompt in enumerate(prompts):
            own = {"kv_budget": 64} if index == 4 else {}
            (outcome,) = engine.run([Job(prompt, greedy(MAX_TOKENS, **own))])
            of_caching.append((outcome.token_ids, outcome.report))
            cached.append(outcome.output.num_cached_tokens)
        engine.check_whole()
        found.append(of_caching)
    assert found[0] == found[1]
    # The first eviction is at 64 tokens, whose last ones, the window, are computed in any case.
    # The larger budget's is later, and finds what the others left behind: all of theirs.
    assert cached == [0] * 6 + [3 * BLOCK] * 3 + [4 * BLOCK]
