# SPDX-License-Identifier: Apache-2.0
"""The bench through real engines: what it reports is what the model and the policy did."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.eval.__main__ import main
from lab.eval.recall import take_recalls
from lab.eval.registry import load_task
from lab.eval.run import Run, Settings, Store
from lab.eval.tables import rows_of
from lab.eval.task import DIGITS_METRIC
from lab.eval.variants import Variant, parse_variants
from tests.plans import recent_positions
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.haystack import load_tokens

pytestmark = [
    pytest.mark.slow,
    *(pytest.mark.engine, pytest.mark.timeout(900)),
    pytest.mark.usefixtures("prepared_programs"),
]

TASKS = ("multi-key", "perplexity", "attention-recall")
LENGTH = 320
FLOAT32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


@pytest.fixture
def fewer_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in the command's own child, not in two more below it, each with vLLM's imports.

    `rows` has engines as users get them.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def rows(folder: Path, random_model: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The command itself, as a user would run it; by task, policy and budget."""
    status = main(
        [
            *("--model", str(random_model), "--out", str(folder)),
            *("--policies", "full,snapkv", "--budgets", "12%,100%"),
            *("--tasks", ",".join(TASKS), "--lengths", str(LENGTH)),
            *("--samples", "3", "--seeds", "0,1", "--engine-args", json.dumps(FLOAT32)),
        ]
    )
    assert status == 0
    found = json.loads((folder / "results.json").read_text())["rows"]
    exact = [row for row in found if row["metric"] != DIGITS_METRIC]
    return {(row["task"], row["policy"], row["budget"]): row for row in exact}


def test_a_full_budget_costs_nothing(rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    for task in TASKS:
        full, everything = rows[task, "full", "100%"], rows[task, "snapkv", "100%"]
        # Perplexity is a float: which prompts shared a step decides the last bits of its sums.
        assert everything["score"] == pytest.approx(full["score"], rel=1e-6)
        assert everything["memory"] == full["memory"] == 1.0
        assert (full["n"], full["seeds"]) == (6, 2)


def test_an_eviction_shows(rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    assert rows["attention-recall", "full", "100%"]["score"] == 1.0
    recall = rows["attention-recall", "snapkv", "12%"]
    assert 0.12 < recall["score"] < 0.95, "top tokens hold more than their share, not all"
    assert 0.1 < recall["memory"] < 0.25
    full, evicted = (rows["perplexity", *of] for of in (("full", "100%"), ("snapkv", "12%")))
    assert evicted["score"] != full["score"]


def test_perplexity_is_that_of_the_model(
    folder: Path, random_model: Path, rows: dict[tuple[str, str, str], dict[str, Any]]
) -> None:
    """With the whole cache, decoding the continuation gives Transformers' loss on it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    tokens = load_tokens(random_model)
    losses = []
    for seed in (0, 1):
        for sample in load_task("perplexity").samples(tokens, LENGTH, 3, seed):
            prompt = tokens.encode(sample.prompt)
            ids = tokens.encode(sample.prompt + sample.answers[0])
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
            targets = torch.tensor(ids[len(prompt) :])
            # Without the first token, whose probability the prefill gives.
            loss = torch.nn.functional.cross_entropy(logits[1:], targets[1:])
            losses.append(float(loss))
    expected = math.exp(sum(losses) / len(losses))
    assert rows["perplexity", "full", "100%"]["score"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("fewer_processes")
def test_recall_is_that_of_the_kept_tokens(folder: Path, random_model: Path) -> None:
    """The engine's recall against attention computed by Transformers over the traced positions."""
    from transformers import AutoModelForCausalLM

    from vllm_pyramid.policy import load_policy

    tokens = load_tokens(random_model)
    sample = load_task("attention-recall").samples(tokens, LENGTH, 1, seed=0)[0]
    ids = tokens.encode(sample.prompt)
    settings = Settings(
        model=str(random_model),
        policies=(Variant("snapkv"), Variant("streaming-llm")),
        budgets=("12%",),
        tasks=(load_task("attention-recall"),),
        lengths=(LENGTH,),
        samples=1,
        seeds=(0,),
        engine_args=FLOAT32,
    )
    evaluation = Run(settings, tokens)
    store = Store(folder / "recall.jsonl")
    evaluation.execute(store, lambda _: None, lambda: None)
    results = {answer.policy: answer.result for answer in evaluation.answers(store)}
    store.close()

    model = AutoModelForCausalLM.from_pretrained(
        random_model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    window, n = load_policy("snapkv").window, len(ids)
    kv_heads = model.config.num_key_value_heads
    for policy, result in results.items():
        assert result.recall is not None
        for layer, attention in enumerate(attentions):
            # [query heads, window, context] to the mass of each KV head and context token.
            mass = attention[0, :, n - window :, : n - window].sum(dim=1)
            mass = mass.unflatten(0, (kv_heads, -1)).mean(dim=1)
            if policy == "streaming-llm":
                kept_tokens = result.eviction.kept_tokens[layer]
                kept = recent_positions(n, kept_tokens, load_policy(policy).sinks)
                inside = torch.tensor(kept[kept < n - window], dtype=torch.long)
                expected = mass[:, inside].sum(dim=1) / mass.sum(dim=1)
                assert result.recall[layer] == pytest.approx(expected.tolist(), rel=1e-3)
            else:  # no choice of as many tokens can hold more
                count = result.eviction.kept_tokens[layer] - window
                best = mass.topk(count, dim=1).values.sum(dim=1) / mass.sum(dim=1)
                for measured, bound in zip(result.recall[layer], best.tolist(), strict=True):
                    assert 0.5 * bound < measured <= bound + 1e-4


@pytest.mark.usefixtures("fewer_processes")
def test_the_built_in_model_finds_what_is_kept(tmp_path: Path) -> None:
    """The shipped weights recall; eviction by attention keeps the fact, by recency it does not.

    The pooling must reach over the number, of which every digit is a token (docs/quality.md).
    """
    wide = "snapkv(kernel_size=11)"
    settings = Settings(
        model=str(model_path()),
        policies=parse_variants('full,snapkv:{"kernel_size":11},streaming-llm', "--policies"),
        budgets=("12%",),
        tasks=(load_task("needle"), load_task("multi-key")),
        lengths=(1024,),
        samples=10,
        seeds=(0,),
    )
    evaluation = Run(settings, load_tokens(settings.model))
    store = Store(tmp_path / "samples.jsonl")
    evaluation.execute(store, lambda _: None, lambda: None)
    found = rows_of(evaluation.answers(store)).itertuples()
    rows: dict[Any, Any] = {(row.task, row.policy, row.metric): row for row in found}
    store.close()
    for task in ("needle", "multi-key"):
        exact = "exact match"
        assert rows[task, "full", exact].score >= 0.9
        assert rows[task, wide, exact].score >= 0.9
        assert rows[task, "streaming-llm", exact].score <= 0.5
        digits = rows[task, "streaming-llm", DIGITS_METRIC].score
        # The first digit comes from the prefill, before the eviction; one in ten others by chance.
        assert 0.2 <= digits <= 0.6 < rows[task, wide, DIGITS_METRIC].score


def test_recalls_are_those_of_the_prompts_end(tmp_path: Path) -> None:
    """Policies that evict during generation write further files, which have none."""
    for name, number, recall in (
        ("a-1-x", {"prompt_len": 40}, 0.5),
        ("a-1-x@72", {"computed": 72}, np.nan),
        ("b-2-y", {"prompt_len": 30}, 0.25),
    ):
        request_id = name.partition("@")[0]
        recalls = {f"recall_{layer}": np.full(2, recall) for layer in range(2)}
        np.savez(tmp_path / f"{name}.npz", request_id=request_id, **number, **recalls)
    assert take_recalls(tmp_path) == {"a-1": [[0.5, 0.5]] * 2, "b-2": [[0.25, 0.25]] * 2}
    assert not list(tmp_path.iterdir())


def test_recalls_of_heads_with_lengths_are_those_of_their_layers(tmp_path: Path) -> None:
    recalls = {f"recall_{lane}": np.full(1, lane / 4) for lane in range(4)}
    named = {"request_id": "a-1-x", "prompt_len": 40, "kv_heads": 2}
    np.savez(tmp_path / "a-1-x.npz", **named, **recalls)
    assert take_recalls(tmp_path) == {"a-1": [[0.0, 0.25], [0.5, 0.75]]}
