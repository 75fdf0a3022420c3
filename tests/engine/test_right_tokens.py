# SPDX-License-Identifier: Apache-2.0
"""The tokens that are kept, and what decoding makes of them, against `paper.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.oracles import (
    EvictedModel,
    check_evictions,
    check_log_probabilities,
    held_at_evictions,
)
from tests.engine.paper import (
    HuggingFaceModel,
    arithmetic_budgets,
    mean_retention,
    window_importance,
    xkv_lengths,
)
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Models,
    Outcome,
    greedy,
    random_prompts,
)

BLOCK = 16
MAX_TOKENS = 12


def _jobs(vocab_size: int, *, staggered: bool) -> list[Job]:
    """Prompts around block and chunk boundaries; staggered ones meet others that decode."""
    prompts = random_prompts([130, 57, 401, 256, 333, 97], seed=11, vocab_size=vocab_size)
    arrivals = [0, 0, 1, 3, 5, 9] if staggered else [0] * len(prompts)
    return [
        Job(prompt, greedy(MAX_TOKENS, logprobs=1), arrival=arrival)
        for prompt, arrival in zip(prompts, arrivals, strict=True)
    ]


def _check_lengths(
    outcome: Outcome, policy: str, window: int, fill_blocks: bool, beta: float = 20.0
) -> None:
    """The budgets of the paper: real numbers, rounded by less than one token, sum conserved."""
    kept, n = outcome.report["kept_tokens"], len(outcome.job.prompt)
    layers, budget = len(kept), outcome.report["kv_budget"]
    mean = budget - window
    if policy == "pyramidkv":
        curve = arithmetic_budgets(mean, layers, n - window, beta)
    else:
        curve = [float(mean)] * layers
    keep = [window + k for k in curve]
    if not fill_blocks:
        assert sum(kept) == budget * layers
        assert all(abs(h - k) < 1 for h, k in zip(kept, keep, strict=True)), (kept, keep)
        return
    for held, wanted in zip(kept, keep, strict=True):
        # What is given back is whole blocks; the next best tokens fill the rest.
        possible = {n - (n - k) // BLOCK * BLOCK for k in (int(wanted), int(wanted) + 1)}
        assert held in possible, (kept, keep)


def _check_solved(
    model: HuggingFaceModel,
    outcome: Outcome,
    policy: str,
    window: int,
    fill_blocks: bool,
    retention: float | None,
) -> None:
    """Lengths that follow from the prompt's scores: the formulas on Transformers' queries, keys."""
    solved, kept = outcome.report["solved_tokens"], outcome.report["kept_tokens"]
    n, layers, budget = len(outcome.job.prompt), len(solved), outcome.report["kv_budget"]
    lengths = [keep - window for keep in solved]
    if fill_blocks:
        assert kept == [n - (n - keep) // BLOCK * BLOCK for keep in solved]
    else:
        assert kept == solved
    scores = [
        window_importance(queries[:, :n], keys[:, :n], window, 7, "mean")
        for queries, keys in zip(model.queries, model.keys, strict=True)
    ]
    assert budget == -(-sum(solved) // layers)
    mean = budget - window
    of_layers = [score.mean(dim=0) for score in scores]
    ours = mean_retention(of_layers, lengths)
    if retention is None:
        assert sum(lengths) == mean * layers
        expected = xkv_lengths(of_layers, total=sum(lengths))
    else:
        expected = xkv_lengths(of_layers, goal=retention)
        assert abs(sum(lengths) - sum(expected)) <= 1 and ours >= retention - 1e-6
    # Tokens of two layers that are equal up to float noise may change places.
    assert sum(abs(a - b) for a, b in zip(lengths, expected, strict=True)) <= 4
    if sum(lengths) == sum(expected):
        assert ours == pytest.approx(mean_retention(of_layers, expected), abs=1e-6)
    for other in ([mean] * layers, arithmetic_budgets(mean, layers, n - window, 20.0)):
        fewer = [int(k) for k in other]  # rounded down: at most the same total
        assert retention is not None or ours >= mean_retention(of_layers, fewer) - 1e-6


def check(
    engine: Engine,
    folder: Path,
    model: EvictedModel,
    policy: str,
    vocab_size: int,
    *,
    window: int = 8,
    fill_blocks: bool = True,
    retention: float | None = None,
    before_run: Callable[[], None] = lambda: None,
) -> None:
    """All of a run: lengths, kept positions, and what decoding makes of them."""
    engine.shuffle_blocks()
    evicted = 0
    for staggered in (False, True):
        before_run()
        for outcome in engine.run(_jobs(vocab_size, staggered=staggered)):
            prompt = outcome.job.prompt
            held = held_at_evictions(folder, outcome, engine.kv_heads)
            tokens = [*prompt, *outcome.token_ids]
            rows = model.decode(tokens, held)[len(prompt) - 1 : -1]
            check_log_probabilities(rows, outcome)
            evicted += check_evictions(
                engine.scheduler.pyramid.policy, engine, model, outcome, held
            )
            if policy == "xkv":
                _check_solved(model, outcome, policy, window, fill_blocks, retention)
            else:
                _check_lengths(outcome, policy, window, fill_blocks)
    engine.check_whole()
    assert evicted > 1000


@pytest.fixture(scope="module")
def demo_reference(random_model: Path) -> EvictedModel:
    return EvictedModel(str(random_model))


@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen2", "mistral"])
def test_other_models(engines: EnginePool, tiny_model: Models, tmp_path: Path, name: str) -> None:
    """No grouping, groups of eight with head size 64, biases, Mistral; other scorer settings."""
    scorer = {"kernel_size": 7, "gqa_reduce": "max"}
    path = tiny_model(name)
    engine = engines.get(
        path,
        kv_policy="pyramidkv",
        kv_budget="25%",
        kv_policy_args={"window": 16, "scorer": scorer},
        kv_trace=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=160,
        max_model_len=1024,
    )
    model = EvictedModel(str(path))
    check(engine, tmp_path, model, "pyramidkv", 512, window=16)


@pytest.mark.parametrize(
    ("policy", "args"),
    [
        ("xkv", {"fill_blocks": False}),
        ("xkv", {"fill_blocks": True}),
        ("xkv", {"fill_blocks": False, "retention": 0.5}),
    ],
)
def test_lengths_from_the_scores(demo, demo_reference, tmp_path, policy, args) -> None:
    """Lengths, kept positions and decoding of the policies that solve each prompt."""
    retention = args.get("retention")
    engine = demo(
        kv_policy=policy,
        kv_budget=None if retention else 40,
        kv_policy_args=args,
        kv_trace=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=100,
        max_model_len=1024,
    )
    check(
        engine,
        tmp_path,
        demo_reference,
        policy,
        2048,
        fill_blocks=args["fill_blocks"],
        retention=retention,
    )
