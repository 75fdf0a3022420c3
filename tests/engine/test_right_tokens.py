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
    window_importance,
)
from tests.engine.support import Engine, EnginePool, Job, Outcome, greedy, random_prompts

pytestmark = pytest.mark.engine

BLOCK = 16
MAX_TOKENS = 12
# Scores that differ by less than this share may change places: float32 has 6e-8, times the length
# of the sums behind a score.
NEAR_TIE = 2e-5


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


def _check_positions(
    trace: Trace, model: HuggingFaceModel, outcome: Outcome, window: int, scorer: dict[str, Any]
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


def _check(
    engine: Engine,
    folder: Path,
    model: HuggingFaceModel,
    policy: str,
    vocab_size: int,
    *,
    window: int = 8,
    fill_blocks: bool = True,
    scorer: dict[str, Any] | None = None,
) -> None:
    engine.shuffle_blocks()
    tally = Tally()
    for staggered in (False, True):
        for outcome in engine.run(_jobs(vocab_size, staggered=staggered)):
            trace = Trace.read(folder / f"{outcome.request_id}.npz")
            assert trace.prompt_len == len(outcome.job.prompt)
            assert trace.held == outcome.report["kept_tokens"]
            assert outcome.report["evicted_tokens"] > 0
            _check_lengths(trace, policy, window, fill_blocks)
            if policy in ("snapkv", "pyramidkv"):
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
    if policy in ("snapkv", "pyramidkv"):
        print(f"{tally.different} of {tally.kept} kept positions differ, all near ties")
        assert tally.kept > 1000 and tally.different <= 0.001 * tally.kept


@pytest.fixture(scope="module")
def demo_reference(demo_model: Path) -> HuggingFaceModel:
    return HuggingFaceModel(str(demo_model))


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
    demo_model: Path,
    demo_reference: HuggingFaceModel,
    tmp_path: Path,
    policy: str,
    fill_blocks: bool,
) -> None:
    """Two query heads a KV head, chunks of 100 tokens, physical blocks in random order."""
    engine = engines.get(
        demo_model,
        kv_policy=policy,
        kv_budget=40,
        kv_policy_args={"fill_blocks": fill_blocks},
        kv_trace=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=100,
        max_model_len=1024,
    )
    _check(engine, tmp_path, demo_reference, policy, 2048, fill_blocks=fill_blocks)


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
    _check(engine, tmp_path, model, "pyramidkv", 512, window=16, scorer=scorer)
