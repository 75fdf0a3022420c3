# SPDX-License-Identifier: Apache-2.0
"""Hybrid models and mixtures of experts: full attention evicts, the rest is as in stock vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.engine.families import FAMILIES, make_family
from tests.engine.families import WINDOW as WINDOW_TOKENS
from tests.engine.hybrid_paper import HybridModel
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Models,
    Outcome,
    greedy,
    is_cpu_build,
    random_prompts,
)
from tests.plumbing.real_model import real_model
from tests.scheduler.checks import check_pool

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WINDOW, BUDGET, KERNEL_SIZE = 8, 64, 5
MAX_TOKENS = 10
# Scores and log probabilities that differ by less may change places: where vLLM computes what
# Transformers does, and where it goes its own way by a little.
NEAR = {"gemma3n": (1e-2, 0.15)}
NEAR_ELSEWHERE = 5e-4, 2e-3
# vLLM's rotary kernel for the CPU is wrong for the form in which this model calls it.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
}
# vLLM runs the model of Transformers, whose classes it changes in this process; or has kernels for
# bfloat16 alone. They are compared with stock vLLM's.
NOT_TRANSFORMERS = ("olmo3", "qwen3-next")
STOCK = (*NOT_TRANSFORMERS, "gemma3n")
# Where vLLM follows what a model was trained with, and Transformers does not.
CHANGES: dict[str, dict[str, Any]] = {"cohere2": {"sliding_window": WINDOW_TOKENS + 1}}
LENGTHS = (130, 57, 333, 20, 256, 197)

# Experts and states have kernels for the CPU in builds for it alone.
CPU_BUILD_ONLY = (
    *("gpt-oss", "llama4", "mixtral", "qwen3-moe", "granite4", "lfm2", "nemotron-h"),
    "qwen3-next",
)


@pytest.fixture(scope="module")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """`family_model(name)`: the folder of a model of `FAMILIES`, written on the first call."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name in CPU_BUILD_ONLY and not is_cpu_build():
            pytest.skip("this build of vLLM has no CPU kernels for experts and states")
        if name not in written:
            written[name] = make_family(name, tmp_path_factory.mktemp(name))
        return written[name]

    return get


def _settings(**changes: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 100,  # prompts come in chunks, beside others that decode
        "kv_policy": "snapkv",
        "kv_budget": BUDGET,
        "kv_policy_args": {"window": WINDOW},
        **changes,
    }


def _readers(folder: Path, full: tuple[int, ...]) -> dict[int, list[int]]:
    """By layer that evicts, those that attend to its cache: itself, and those that share it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    shared = int(getattr(config, "num_kv_shared_layers", 0) or 0)
    own = config.num_hidden_layers - shared
    result = {layer: [layer] for layer in full if layer < own}
    for layer in full:
        if layer >= own:
            result[max(result)].append(layer)
    return result


def _check_greedy(logprobs: torch.Tensor, outcome: Outcome, near: float) -> None:
    """The tokens are the likeliest ones, or so near to them that rounding decides."""
    start = len(outcome.job.prompt) - 1
    for index, token in enumerate(outcome.token_ids):
        row = logprobs[start + index]
        assert float(row.max() - row[token]) < near, (index, token, int(row.argmax()))


def _check_kept(
    model: HybridModel, layer: int, kept: torch.Tensor, n: int, near: float
) -> tuple[int, int]:
    """Kept positions are the best ones; returns how many there are, and how many are near ties."""
    heads, held = kept.shape
    scores = model.importance(layer, WINDOW, KERNEL_SIZE)
    assert scores.shape == (heads, n - WINDOW)
    different = 0
    for head, positions in enumerate(kept.tolist()):
        assert positions == sorted(set(positions)) and len(positions) == held
        assert positions[-WINDOW:] == list(range(n - WINDOW, n))
        best = scores[head].topk(held - WINDOW)
        lowest = float(best.values.min())
        for position in set(positions[:-WINDOW]) ^ set(best.indices.tolist()):
            different += 1
            assert abs(float(scores[head, position]) - lowest) <= near * lowest, (layer, head)
    return held * heads, different


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_TRANSFORMERS])
def test_family(engines: EnginePool, family_model: Models, tmp_path: Path, name: str) -> None:
    """Nothing evicted: Transformers' tokens. Evicted: the oracle's positions and tokens."""
    family, folder = FAMILIES[name], family_model(name)
    readers = _readers(folder, family.full_layers)
    layers = sorted(readers)
    model = HybridModel(str(folder), **CHANGES.get(name, {}))
    own = OWN_SETTINGS.get(name, {})
    engine = engines.get(folder, kv_trace=str(tmp_path), **_settings(**own))
    assert engine.coordinator.layers == layers
    prompts = random_prompts(LENGTHS, seed=3)
    whole = {"kv_policy": "full"}
    jobs = [
        Job(prompt, greedy(MAX_TOKENS, logprobs=1, **extra), arrival=index)
        for index, prompt in enumerate(prompts)
        for extra in ({}, whole)
    ]
    engine.shuffle_blocks()
    most_held: dict[str, int] = {"other_layers": 0}

    def look(engine: Engine) -> None:
        check_pool(engine.coordinator)
        most_held["other_layers"] = max(
            most_held["other_layers"], engine.coordinator.stock_groups.held_blocks
        )

    outcomes = engine.run(jobs, look)
    engine.check_whole()
    assert bool(most_held["other_layers"]) == bool(family.other_layers)
    for evicted, kept_whole in zip(outcomes[::2], outcomes[1::2], strict=True):
        # Every layer, and every reader of its cache, attends before it evicts.
        for token, logprob in evicted.logprobs[0].items():
            assert abs(logprob - kept_whole.logprobs[0][token]) < 1e-4
    _check_outcomes(engine, model, outcomes, readers, tmp_path, NEAR.get(name, NEAR_ELSEWHERE))


def _check_outcomes(
    engine: Engine,
    model: HybridModel,
    outcomes: list[Outcome],
    readers: dict[int, list[int]],
    traces: Path,
    near: tuple[float, float],
) -> None:
    """Kept positions are the oracle's, and the tokens those of attention with the rest hidden."""
    layers = sorted(readers)
    compared = np.zeros(2, np.int64)
    for outcome in outcomes:
        prompt, report = outcome.job.prompt, outcome.report
        n, tokens = len(prompt), [*prompt, *outcome.token_ids]
        assert report.get("layers", layers) == layers
        kept: dict[int, torch.Tensor] = {}
        if report["kv_policy"] == "snapkv" and n > BUDGET:
            skipped = (n - BUDGET) // engine.block_size * engine.block_size
            assert report["kept_tokens"] == [n - skipped] * len(layers)
            model.forward(prompt)
            with np.load(traces / f"{outcome.request_id}.npz") as file:
                assert file["layers"].tolist() == layers
                of_layers = [torch.from_numpy(file[f"kept_{i}"]) for i in range(len(layers))]
            for layer, positions in zip(layers, of_layers, strict=True):
                assert len(positions) == len(model.calls[layer].key)
                compared += _check_kept(model, layer, positions, n, near[0])
                kept |= dict.fromkeys(readers[layer], positions)
        else:
            assert report["kept_tokens"] == [n] * len(layers)
        _check_greedy(model.forward(tokens, n, kept), outcome, near[1])
    assert compared[0] > 0 and compared[1] < 0.01 * compared[0]


def test_a_real_hybrid(engines: EnginePool, tmp_path: Path) -> None:
    """Gemma 3 270M: text longer than its windows; of eighteen layers the three full ones evict."""
    folder = real_model("gemma3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    layers = (5, 11, 17)
    engine = engines.get(folder, kv_trace=str(tmp_path), **_settings(max_model_len=1024))
    assert engine.coordinator.layers == list(layers)
    outcomes = engine.run(
        [
            Job(ids[start : start + length], greedy(MAX_TOKENS, **extra))
            for start, length in ((0, 300), (2000, 620))
            for extra in ({}, {"kv_policy": "full"})
        ]
    )
    engine.check_whole()
    readers = _readers(folder, layers)
    _check_outcomes(engine, HybridModel(str(folder)), outcomes, readers, tmp_path, NEAR_ELSEWHERE)


def _check_same(expected: Outcome, found: Outcome, near: float) -> None:
    """The same tokens up to one that is as likely as the one expected, by `near`."""
    for index, (theirs, ours) in enumerate(zip(expected.token_ids, found.token_ids, strict=True)):
        if theirs != ours:
            likely = expected.logprobs[index]
            assert ours in likely and likely[theirs] - likely[ours] < near, (index, theirs, ours)
            return


@pytest.mark.parametrize("name", STOCK)
def test_family_like_stock(engines: EnginePool, family_model: Models, name: str) -> None:
    """Nothing evicted: stock vLLM's tokens, one request after the other. Evicted: the counts."""
    family, folder = FAMILIES[name], family_model(name)
    dtype = {"dtype": "bfloat16"} if name == "qwen3-next" else {}
    prompts = random_prompts((*LENGTHS, 480), seed=3)  # blocks beside states may be long

    def generate(engine: Engine, **extra: Any) -> list[Outcome]:
        return [
            outcome
            for prompt in prompts
            for outcome in engine.generate([prompt], greedy(MAX_TOKENS, logprobs=2, **extra))
        ]

    stock = {**_settings(), **dtype, "kv_policy": "none", "enable_prefix_caching": False}
    del stock["kv_budget"], stock["kv_policy_args"]
    expected = generate(engines.get(folder, **stock))
    engine = engines.get(folder, **_settings(**dtype))
    whole = generate(engine, kv_policy="full")
    for ours, theirs in zip(whole, expected, strict=True):
        _check_same(theirs, ours, near=0.05 if dtype else 0.0)
    evicted = generate(engine)
    engine.check_whole()
    assert max(outcome.report["evicted_tokens"] for outcome in evicted) > 0
    for outcome in evicted:
        n, size = len(outcome.job.prompt), engine.block_size
        skipped = max(n - BUDGET, 0) // size * size
        assert set(outcome.report["kept_tokens"]) == {n - skipped}
        assert outcome.report.get("layers") == list(_readers(folder, family.full_layers))
    assert [one.token_ids for one in evicted] != [one.token_ids for one in whole]


def test_readers_find_v_in_host_memory(engines: EnginePool, family_model: Models) -> None:
    """With V elsewhere and all keys chosen, layers that read another's cache change nothing."""
    folder = family_model("gemma3n")
    prompts = random_prompts(LENGTHS, seed=3)
    found = []
    for policy, args in (("full", {}), ("kcache", {"top_n": 512})):
        settings = {**_settings(kv_policy=policy), "kv_policy_args": args}
        del settings["kv_budget"]
        engine = engines.get(folder, **settings)
        found.append([one.token_ids for one in engine.generate(prompts, greedy(MAX_TOKENS))])
        engine.check_whole()
    assert found[0] == found[1]
