# SPDX-License-Identifier: Apache-2.0
"""Eviction beside prompt embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.beside import BLOCK, BUDGET, SETTINGS, WHOLE, WINDOW, check_decoding
from tests.engine.paper import HuggingFaceModel
from tests.engine.support import EnginePool, Job, Models, greedy, random_prompts

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that engines, each shared by two tests, write their traces to."""
    return tmp_path_factory.mktemp("traces")


def test_prompt_embeddings(engines: EnginePool, tiny_model: Models, traces: Path) -> None:
    """The embeddings of tokens in place of the tokens: the same survivors and the same answer."""
    path = tiny_model("qwen3")
    rows = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    engine = engines.get(path, enable_prompt_embeds=True, kv_trace=str(traces), **SETTINGS)
    model = HuggingFaceModel(str(path))
    cases = [(prompt, extra) for prompt in random_prompts([230, 120, 40]) for extra in ({}, WHOLE)]
    outcomes = engine.run(
        Job(prompt, greedy(MAX_TOKENS, logprobs=1, **extra), embeds=embeds)
        for prompt, extra in cases
        for embeds in (None, rows[torch.tensor(prompt)])
    )
    engine.check_whole()
    for (prompt, extra), tokens, embeds in zip(cases, outcomes[::2], outcomes[1::2], strict=True):
        evicts = len(prompt) > BUDGET + BLOCK and not extra
        assert tokens.report == embeds.report
        assert bool(tokens.report["evicted_tokens"]) == evicts
        assert tokens.token_ids == embeds.token_ids
        for outcome in (tokens, embeds):
            check_decoding(model, outcome, traces)


def test_prompt_embeddings_share_with_their_equals_alone(engines, tiny_model, traces) -> None:
    """Placeholders of tokens are all alike: what is cached goes by the embeddings."""
    path = tiny_model("qwen3")
    rows = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    engine = engines.get(path, enable_prompt_embeds=True, kv_trace=str(traces), **SETTINGS)
    one, other = random_prompts([230, 230], seed=1)
    branch = [*one[:100], *other[100:]]
    hit = (230 - WINDOW) // BLOCK * BLOCK
    found, tokens = [], []
    for prompt, embedded in (
        *((one, True), (other, True), (one, False), (one, True)),
        *((branch, True), (branch, False)),
        ([0] * 230, False),  # the placeholders
    ):
        embeds = rows[torch.tensor(prompt)] if embedded else None
        (outcome,) = engine.run([Job(prompt, greedy(4), embeds=embeds)])
        found.append(outcome.cached)
        tokens.append(outcome.token_ids)
    assert found == [0, 0, 0, hit, 96, 96, 0]
    assert tokens[0] == tokens[2] == tokens[3] and tokens[4] == tokens[5]
    assert len(set(map(tuple, tokens))) == 4
