# SPDX-License-Identifier: Apache-2.0
"""Eviction beside LoRA adapters: each request keeps by the attention of its own weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.beside import BLOCK, SETTINGS, WHOLE, WINDOW, check_decoding
from tests.engine.oracles import check_log_probabilities
from tests.engine.paged_paper import PagedModel, pages_read
from tests.engine.paper import HuggingFaceModel
from tests.engine.support import Engine, EnginePool, Job, greedy, random_prompts

RANK, MAX_TOKENS = 8, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that engines, each shared by two tests, write their traces to."""
    return tmp_path_factory.mktemp("traces")


def _write_adapter(folder: Path, model: Path, seed: int) -> dict[str, torch.Tensor]:
    """A random LoRA adapter of all attention projections; returns what it adds to each weight."""
    folder.mkdir()
    source = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    added: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not any(f"{part}.weight" in name for part in PROJECTIONS):
            continue
        rows, columns = weight.shape
        down = torch.randn(RANK, columns, generator=source) * columns**-0.5
        up = torch.randn(rows, RANK, generator=source) * 0.5 * RANK**-0.5
        stem = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        added[name] = 2.0 * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(PROJECTIONS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return added


def _merge(folder: Path, model: Path, added: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    merged = {name: weight + added.get(name, 0.0) for name, weight in weights.items()}
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory) -> tuple[dict[int, Any], dict[int, Path]]:
    """Two LoRA requests by number, and the models that they make; 0 is the base model."""
    from vllm.lora.request import LoRARequest

    folder, base = tmp_path_factory.mktemp("lora"), tiny_model("llama-mha")
    requests: dict[int, Any] = {0: None}
    merged = {0: base}
    for number in (1, 2):
        path = folder / f"adapter{number}"
        merged[number] = _merge(
            folder / f"merged{number}", base, _write_adapter(path, base, number)
        )
        requests[number] = LoRARequest(f"adapter{number}", number, str(path))
    return requests, merged


def _lora_engine(engines: EnginePool, base: Path, traces: Path) -> Engine:
    # One slot more than adapters. The operators of vLLM 0.32 for the CPU give tokens of the base
    # model, whose index is -1, the adapter of the last slot; an empty one adds nothing.
    return engines.get(
        base, enable_lora=True, max_loras=3, max_lora_rank=RANK, kv_trace=str(traces), **SETTINGS
    )


def test_adapters_and_the_base_model_in_one_batch(engines, adapters, traces) -> None:
    """Each keeps by its own attention, and goes on with its own weights; prompts in chunks."""
    loras, merged = adapters
    engine = _lora_engine(engines, merged[0], traces)
    first, second = random_prompts([230, 150])
    cases = [
        (number, prompt, extra)
        for prompt in (first, second)
        for number in merged
        for extra in ({}, WHOLE)
    ]
    outcomes = engine.run(
        Job(prompt, greedy(MAX_TOKENS, logprobs=1, **extra), lora=loras[number])
        for number, prompt, extra in cases
    )
    engine.check_whole()
    models = {number: HuggingFaceModel(str(path)) for number, path in merged.items()}
    for (number, _, extra), outcome in zip(cases, outcomes, strict=True):
        assert bool(outcome.report["evicted_tokens"]) == (not extra)
        check_decoding(models[number], outcome, traces)
    # Adapters make a difference, and evictions do.
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == len(cases)


def test_adapters_read_what_their_own_queries_ask_for(engines, adapters) -> None:
    """Selected pages, with adapters and the base model in one batch."""
    loras, merged = adapters
    attend = {"budget": 6 * BLOCK, "dense_layers": 1, "sinks": BLOCK, "recent": BLOCK}
    settings = {**SETTINGS, "kv_policy": "select", "kv_policy_args": {"attend": attend}}
    settings |= {"kv_budget": None, "enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
    engine = engines.get(merged[0], **settings)
    cases = [(number, prompt) for prompt in random_prompts([230, 350]) for number in merged]
    with pages_read(engine) as pages:
        outcomes = engine.run(
            Job(prompt, greedy(MAX_TOKENS, logprobs=1), lora=loras[number])
            for number, prompt in cases
        )
    engine.check_whole()
    models = {number: PagedModel(str(path)) for number, path in merged.items()}
    for (number, prompt), outcome in zip(cases, outcomes, strict=True):
        model, tokens = models[number], outcome.token_ids
        assert outcome.report["pages_read"] < outcome.report["pages_visible"]
        model.pages, model.name, model.page_size = pages, outcome.request_id, BLOCK
        logprobs = model.forward(prompt + tokens[:-1], len(prompt))[len(prompt) - 1 :]
        check_log_probabilities(logprobs, outcome, 2e-4)
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == len(cases)


def test_adapters_do_not_share_prefixes(engines, adapters, traces) -> None:
    """The same prompt hits what the same adapter left behind, and nobody else's."""
    loras, merged = adapters
    engine = _lora_engine(engines, merged[0], traces)
    assert engine.llm.reset_prefix_cache()
    (prompt,) = random_prompts([230], seed=1)
    hit = (230 - WINDOW) // BLOCK * BLOCK
    found, tokens = [], []
    for number in (0, 1, 2, 1, 0, 2):
        (outcome,) = engine.run([Job(prompt, greedy(4), lora=loras[number])])
        found.append(outcome.cached)
        tokens.append(outcome.token_ids)
    assert found == [0, 0, 0, hit, hit, hit]
    assert tokens[3:] == [tokens[1], tokens[0], tokens[2]]
