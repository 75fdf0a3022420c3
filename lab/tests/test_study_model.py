# SPDX-License-Identifier: Apache-2.0
"""`lab/method_study/model.py` against Transformers' own attention, on small random models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

pytestmark = pytest.mark.cpu

FOLDER = Path(__file__).parents[1] / "method_study"
PROMPT, BEHIND, WINDOW = 90, 12, 16
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(num_hidden_layers=3, **SIZES),
    "qwen2": Qwen2Config(num_hidden_layers=3, **SIZES),
    "gemma3": Gemma3TextConfig(
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **SIZES,
    ),
}


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    """The script, as the others of its folder see it."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("model")
    sys.path.remove(str(FOLDER))
    sys.modules.pop("model", None)


@pytest.fixture(scope="module", params=CONFIGS)
def both(
    request: pytest.FixtureRequest, study: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, list[int], list[int]]:
    """Ours, Transformers' with its eager attention, a prompt and what follows it."""
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp(request.param)
    made = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32)
    for name, weight in made.named_parameters():
        if "norm" not in name:  # large, so that attention is not flat; biases that are not zero
            torch.nn.init.normal_(weight, std=0.3)
    made.save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(1, 97, (PROMPT + BEHIND,)).tolist()
    return study.Model(folder), theirs, ids[:PROMPT], ids[PROMPT:]


@torch.no_grad()
def test_without_eviction_logits_are_transformers_own(both: Any, study: ModuleType) -> None:
    ours, theirs, prompt, behind = both
    expected = theirs(torch.tensor([prompt + behind])).logits[0]
    recorded, last = ours.prefill(prompt)
    torch.testing.assert_close(last, expected[PROMPT - 1], rtol=1e-4, atol=1e-4)
    everything = [
        [torch.arange(PROMPT)] * ours.kv_heads,  # one length: all heads at once
    ] * ours.layers
    ways = [study.Whole(), study.Evicted(everything)]
    for got in ours.continued(recorded, behind, ways):
        torch.testing.assert_close(got, expected[PROMPT:], rtol=1e-4, atol=1e-4)
    assert len(recorded.layers) == ours.layers == (2 if recorded.sliding else 3)
    assert all(cache.keys.shape[1] == WINDOW - 1 for cache in recorded.sliding.values())


@torch.no_grad()
def test_greedy_tokens_are_transformers_own(both: Any) -> None:
    ours, theirs, prompt, _ = both
    ids = list(prompt)
    for _ in range(2 * WINDOW):  # beyond a sliding window
        ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    assert ours.greedy(*ours.prefill(prompt), 2 * WINDOW) == ids[PROMPT:]


@torch.no_grad()
def test_evicted_tokens_are_masked_ones(both: Any, study: ModuleType) -> None:
    """Places that differ by head, of equal and of unequal numbers, against Transformers' masks."""
    ours, theirs, prompt, behind = both
    recorded, _ = ours.prefill(prompt)
    torch.manual_seed(1)
    total = PROMPT + BEHIND
    for lengths in ((20, 20), (20, 31)):
        places = [torch.randperm(PROMPT)[:length].sort().values for length in lengths]
        (got,) = ours.continued(recorded, behind, [study.Evicted([places] * ours.layers)])
        seen = torch.ones(1, ours.heads, total, total, dtype=torch.bool).tril()
        sliding = seen & ~torch.ones(total, total, dtype=torch.bool).tril(-WINDOW)
        for head in range(ours.heads):
            evicted = torch.ones(PROMPT, dtype=torch.bool)
            evicted[places[head * ours.kv_heads // ours.heads]] = False
            seen[0, head, PROMPT:, :PROMPT] &= ~evicted
        added = [torch.zeros(x.shape).masked_fill(~x, -torch.inf) for x in (seen, sliding)]
        masks: Any = added[0]
        if recorded.sliding:
            masks = {"full_attention": added[0], "sliding_attention": added[1]}
        expected = theirs(torch.tensor([prompt + behind]), attention_mask=masks).logits[0, PROMPT:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        (whole,) = ours.continued(recorded, behind)
        assert float((whole - got).abs().max()) > 0.1
