# SPDX-License-Identifier: Apache-2.0
"""The built-in model as it is shipped."""

from __future__ import annotations

import json

import pytest

from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = pytest.mark.cpu


def test_shape_and_size() -> None:
    config = json.loads((model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] >= 8
    assert config["head_dim"] in (32, 64)
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["max_position_embeddings"] >= 4096
    # Transformers 4 and 5 read it from different places.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert (model_path() / "model.safetensors").stat().st_size <= 24e6


def test_the_card_names_the_text_and_its_licence() -> None:
    card = (model_path() / "README.md").read_text()
    for words in (
        "Python Software Foundation",
        "PSF licence",
        "seed 20261120",
        "no assistant",
    ):
        assert words in card


def test_tokenizer_round_trips_any_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    english = "\n\n".join(topics().values())
    for sample in ("A plain sentence, 42.", "naïve 漢字 😀\t\x07\n", english[:5000]):
        ids = tokenizer(sample).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample
    assert len(english) / len(tokenizer(english).input_ids) > 2.5  # it did learn English
    digits = tokenizer("is 48213.", add_special_tokens=False).input_ids
    assert [tokenizer.decode([token]) for token in digits[1:]] == [" 4", *"8213", "."]


def test_chat_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|begin|><|user|>\nHello<|end|>\n<|assistant|>\n"
