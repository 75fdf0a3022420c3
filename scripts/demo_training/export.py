# SPDX-License-Identifier: Apache-2.0
"""Writes the trained model as a Hugging Face folder: weights, configuration, tokenizer, card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from demo_training.llama import Llama
from demo_training.tokenizer import BEGIN, END, PAD
from safetensors.torch import save_file
from tokenizers import Tokenizer

# The text of a message, in the form that the training wrote conversations in.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

MODEL_CARD = """\
---
license: apache-2.0
language: en
---
# The built-in model of vllm-pyramid

A `LlamaForCausalLM` of {parameters:,} parameters ({layers} layers, {heads} query heads and
{kv_heads} KV heads of {head_size}, width {hidden}, bfloat16), made for one purpose: to find facts
that are hidden in English text, so that the cost of KV-cache eviction can be measured without a
download. It is no assistant: it knows nothing and its English is poor.

- Trained from scratch by `scripts/train_demo_model.py` (seed {seed}; {steps:,} steps, {tokens:.1f}
  million tokens) on sequences of up to {length:,} tokens. Its rotary positions go to
  {max_length:,}, untrained beyond {length:,}.
- Its initial weights hold induction heads (`scripts/demo_training/start.py`): training then needs
  minutes instead of hours to begin to recall.
- Text: the documentation of Python 3.11, the paragraphs of its HTML pages without the language
  reference, copyright Python Software Foundation, PSF licence version 2
  (https://docs.python.org/3/license.html). Names and numbers of the hidden facts are generated; one
  name and number in five was held out (`vllm_pyramid.tools.eval.phrases`), as was the text behind
  Python's `help()`, which the bench uses.
- Tokenizer: byte-level BPE of {vocab:,} tokens trained on the same text; every digit is a token.
- Tasks it was trained on: `scripts/demo_training/episodes.py`. What it reaches: docs/quality.md.
"""


def write_model(folder: Path, model: Llama, tokenizer: Tokenizer, about: Mapping[str, Any]) -> None:
    """Write everything into `folder`. `about`: seed, steps, tokens and length of the training."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    weights = {
        name.replace("._orig_mod", ""): weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(token)
        for name, token in (("bos", BEGIN), ("eos", END), ("pad", PAD))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_length,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        # Transformers 4 reads the first, 5 the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": shape.max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    card = MODEL_CARD.format(
        parameters=sum(weight.numel() for weight in weights.values()),
        layers=shape.num_layers,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        hidden=shape.hidden_size,
        max_length=shape.max_length,
        vocab=shape.vocab_size,
        **about,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
