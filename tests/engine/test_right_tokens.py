# SPDX-License-Identifier: Apache-2.0
"""The tokens that are kept, and what decoding makes of them, against `paper.py`.

All in float32: what is left are sums in another order, so a kept set may differ only where two
scores are equal up to float noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paper import (
    HuggingFaceModel,
    arithmetic_budgets,
    keep_best,
    lengths_in_proportion,
    mean_retention,
    tokens_for_share,
    window_importance,
    xkv_lengths,
)
from tests.engine.support import Engine, EnginePool, Job, Outcome, greedy, random_prompts

pytestmark = pytest.mark.engine

BLOCK = 16
MAX_TOKENS = 12
# Scores that differ by less than this share may change places: float32 has 6e-8, times the length
# of the sums behind a score.
NEAR_TIE = 2e-5
SCORED = ("snapkv", "pyramidkv", "xkv", "zigzagkv")
SOLVED = SCORED[2:]
KERNEL_SIZES = {"xkv": 7}


@dataclass
class Trace:
    """What `--kv-trace` wrote of one request."""

    prompt_len: int
    budget: int
    held: list[int]
    kept: list[torch.Tensor]  # a layer: [G, held]

    @classmethod
    def read(cls, path: Path) -> Trace:
        with np.load(path) as file:
            held = file["held"].tolist()
            kept = [torch.from_numpy(file[f"kept_{layer}"]) for layer in range(len(held))]
            return cls(int(file["prompt_len"]), int(file["budget"]), held, kept)


@dataclass
class Tally:
    """Positions compared and those that differ."""

    kept: int = 0
    different: int = 0


def _jobs(vocab_size: int, *, staggered: bool) -> list[Job]:
    """Prompts around block and chunk boundaries; staggered ones meet others that decode."""
    prompts = random_prompts([130, 57, 401, 256, 333, 97], seed=11, vocab_size=vocab_size)
    arrivals = [0, 0, 1, 3, 5, 9] if staggered else [0] * len(prompts)
    return [
        Job(prompt, greedy(MAX_TOKENS, logprobs=1), arrival=arrival)
        for prompt, arrival in zip(prompts, arrivals, strict=True)
    ]


def _check_lengths(
    trace: Trace, policy: str, window: int, fill_blocks: bool, beta: float = 20.0
) -> None:
    """The budgets of the paper: real numbers, rounded by less than one token, sum conserved."""
    layers, n = len(trace.held), trace.prompt_len
    mean = trace.budget - window
    if policy == "pyramidkv":
        curve = arithmetic_budgets(mean, layers, n - window, beta)
    else:
        curve = [float(mean)] * layers
    keep = [window + k for k in curve]
    if not fill_blocks:
        assert sum(trace.held) == trace.budget * layers
        assert all(abs(h - k) < 1 for h, k in zip(trace.held, keep, strict=True)), (trace, keep)
        return
    for held, wanted in zip(trace.held, keep, strict=True):
        # What is given back is whole blocks; the next best tokens fill the rest.
        possible = {n - (n - k) // BLOCK * BLOCK for k in (int(wanted), int(wanted) + 1)}
        assert held in possible, (trace.held, keep)


def _check_solved(
    trace: Trace,
    model: HuggingFaceModel,
    outcome: Outcome,
    policy: str,
    window: int,
    fill_blocks: bool,
    retention: float | None,
) -> None:
    """Lengths that follow from the prompt's scores: the formulas on Transformers' queries, keys."""
    model.forward(outcome.job.prompt)
    solved = outcome.report["solved_tokens"]
    n, layers = trace.prompt_len, len(solved)
    lengths = [keep - window for keep in solved]
    if fill_blocks:
        assert trace.held == [n - (n - keep) // BLOCK * BLOCK for keep in solved]
    else:
        assert trace.held == solved
    kernel_size = KERNEL_SIZES.get(policy, 5) if policy in ("xkv", "zigzagkv") else 1
    scores = [
        window_importance(queries, keys, window, kernel_size, "mean")
        for queries, keys in zip(model.queries, model.keys, strict=True)
    ]
    assert trace.budget == outcome.report["kv_budget"] == -(-sum(solved) // layers)
    mean = trace.budget - window
    if policy == "xkv":
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
        return
    assert sum(solved) == trace.budget * layers
    weights = [tokens_for_share(score, 0.9) for score in scores]
    expected_lengths = lengths_in_proportion(weights, mean, 0.25)
    assert all(abs(k - e) < 1.01 for k, e in zip(lengths, expected_lengths, strict=True))


def _check_positions(
    trace: Trace,
    model: HuggingFaceModel,
    outcome: Outcome,
    window: int,
    scorer: dict[str, Any],
) -> Tally:
    """The kept positions, per layer and KV head; a difference must be a near tie."""
    model.forward(outcome.job.prompt)
    tally = Tally()
    for layer, (held, kept) in enumerate(zip(trace.held, trace.kept, strict=True)):
        importance = window_importance(
            model.queries[layer],
            model.keys[layer],
            window,
            scorer.get("kernel_size", 5),
            scorer.get("gqa_reduce", "mean"),
        )
        assert kept.shape == (importance.shape[0], held)
        for head, expected in enumerate(keep_best(importance, held, window)):
            positions = kept[head].tolist()
            assert positions == sorted(set(positions))
            assert set(range(trace.prompt_len - window, trace.prompt_len)) <= set(positions)
            missing, extra = expected - set(positions), set(positions) - expected
            tally.kept += held
            tally.different += len(missing)
            for a, b in itertools.product(missing, extra):
                gap = abs(float(importance[head, a] - importance[head, b]))
                assert gap <= NEAR_TIE * float(importance[head, a]), (
                    f"layer {layer}, head {head}: keeps {b} instead of {a}, scores "
                    f"{float(importance[head, b])} and {float(importance[head, a])}"
                )
    return tally


def _check_decode(trace: Trace, model: HuggingFaceModel, outcome: Outcome) -> None:
    """Every generated token is what attention over exactly the kept tokens gives."""
    tokens = outcome.job.prompt + outcome.token_ids
    logprobs = model.forward(tokens, trace.prompt_len, trace.kept)
    rows = logprobs[trace.prompt_len - 1 : -1]
    assert rows.argmax(dim=-1).tolist() == outcome.token_ids
    for row, token, ours in zip(rows, outcome.token_ids, outcome.logprobs, strict=True):
        assert ours[token] == pytest.approx(float(row[token]), abs=5e-4)


def check(
    engine: Engine,
    folder: Path,
    model: HuggingFaceModel,
    policy: str,
    vocab_size: int,
    *,
    window: int = 8,
    fill_blocks: bool = True,
    scorer: dict[str, Any] | None = None,
    retention: float | None = None,
    before_run: Callable[[], None] = lambda: None,
) -> None:
    """All of a run: lengths, kept positions, and what decoding makes of them."""
    engine.shuffle_blocks()
    tally = Tally()
    for staggered in (False, True):
        before_run()
        for outcome in engine.run(_jobs(vocab_size, staggered=staggered)):
            trace = Trace.read(folder / f"{outcome.request_id}.npz")
            assert trace.prompt_len == len(outcome.job.prompt)
            assert trace.held == outcome.report["kept_tokens"]
            assert outcome.report["evicted_tokens"] > 0
            if policy in SOLVED:
                _check_solved(trace, model, outcome, policy, window, fill_blocks, retention)
            else:
                _check_lengths(trace, policy, window, fill_blocks)
            if policy in SCORED:
                part = _check_positions(trace, model, outcome, window, scorer or {})
                tally.kept += part.kept
                tally.different += part.different
            else:
                sinks = 4 if policy == "streaming-llm" else 0
                for held, kept in zip(trace.held, trace.kept, strict=True):
                    recent = range(trace.prompt_len - held + sinks, trace.prompt_len)
                    assert (kept == torch.tensor([*range(sinks), *recent])).all()
            _check_decode(trace, model, outcome)
    engine.check_whole()
    if policy in SCORED:
        print(f"{tally.different} of {tally.kept} kept positions differ, all near ties")
        assert tally.kept > 1000 and tally.different <= 0.001 * tally.kept


@pytest.fixture(scope="module")
def demo_reference(random_model: Path) -> HuggingFaceModel:
    return HuggingFaceModel(str(random_model))


@pytest.mark.parametrize(
    ("policy", "fill_blocks"),
    [
        ("pyramidkv", True),
        ("pyramidkv", False),
        ("snapkv", True),
        ("streaming-llm", False),
    ],
)
def test_kept_tokens_and_decoding(
    engines: EnginePool,
    random_model: Path,
    demo_reference: HuggingFaceModel,
    tmp_path: Path,
    policy: str,
    fill_blocks: bool,
) -> None:
    """Two query heads a KV head, chunks of 100 tokens, physical blocks in random order."""
    engine = engines.get(
        random_model,
        kv_policy=policy,
        kv_budget=40,
        kv_policy_args={"fill_blocks": fill_blocks},
        kv_trace=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=100,
        max_model_len=1024,
    )
    check(engine, tmp_path, demo_reference, policy, 2048, fill_blocks=fill_blocks)


@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen2", "mistral"])
def test_other_models(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
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
    model = HuggingFaceModel(str(path))
    check(engine, tmp_path, model, "pyramidkv", 512, window=16, scorer=scorer)


@pytest.mark.parametrize(
    ("policy", "args"),
    [
        ("xkv", {"fill_blocks": False}),
        ("xkv", {"fill_blocks": True}),
        ("xkv", {"fill_blocks": False, "retention": 0.5}),
        ("zigzagkv", {"fill_blocks": False}),
        ("zigzagkv", {"fill_blocks": True}),
    ],
)
def test_lengths_from_the_scores(
    engines: EnginePool,
    random_model: Path,
    demo_reference: HuggingFaceModel,
    tmp_path: Path,
    policy: str,
    args: dict[str, Any],
) -> None:
    """Lengths, kept positions and decoding of the policies that solve each prompt."""
    retention = args.get("retention")
    engine = engines.get(
        random_model,
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
        scorer={"kernel_size": KERNEL_SIZES.get(policy, 5)},
        retention=retention,
    )
