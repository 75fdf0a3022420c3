# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of several shapes, written with Transformers' own classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
HIDDEN_SIZE = 128
# Standard deviation of the attention logits, so that a few keys lead in every head.
LOGIT_STD = 1.5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SIZED = {**_HEADS, "head_dim": 32}
_THIN = {"hidden_size": 32, "num_key_value_heads": 1}

# name: (model class, its configuration beyond `_COMMON`)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Multi-head attention: every query head has a KV head of its own.
    "llama-mha": ("Llama", {**_SIZED, "num_key_value_heads": 4}),
    # Multi-query attention, group of 8, head size 64.
    "llama-mqa": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    # Biases on the projections.
    "qwen2": ("Qwen2", _HEADS),
    # Norms on the heads of queries and keys.
    "qwen3": ("Qwen3", _SIZED),
    "mistral": ("Mistral", {**_SIZED, "sliding_window": None}),
    "mistral-sliding": ("Mistral", {**_SIZED, "sliding_window": 64}),
    # A mixture of experts: the router's weight is as small as weights get.
    "mixtral": (
        "Mixtral",
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    # As many layers as real models have.
    "llama-deep": (
        "Llama",
        {
            **_THIN,
            "intermediate_size": 64,
            "num_hidden_layers": 32,
            "num_attention_heads": 2,
            "head_dim": 16,
        },
    ),
    # As little arithmetic as possible, for tests that count blocks over many long prompts.
    "llama-thin": (
        "Llama",
        {**_THIN, "intermediate_size": 32, "num_attention_heads": 1, "head_dim": 32},
    ),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the model `name` of `SHAPES` into `folder` in float32, without a tokenizer."""
    import torch
    import transformers

    family, options = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(20240604)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                if key.endswith("bias"):
                    weight.normal_(0.0, 0.3, generator=generator)
                continue
            std = weight.shape[1] ** -0.5
            if "q_proj" in key or "k_proj" in key:
                std = math.sqrt(LOGIT_STD / weight.shape[1])
            elif "embed_tokens" in key:
                std = 0.3
            weight.normal_(0.0, std, generator=generator)
    model.save_pretrained(folder)
    return folder


def write_centres(folder: Path, shape: tuple[str, dict[str, Any]]) -> Path:
    """Write centres of queries, made up, for a model of a shape; return the file."""
    import torch

    from vllm_pyramid.methods.triattention import Centres

    heads = shape[1]["num_attention_heads"]
    size = shape[1].get("head_dim", HIDDEN_SIZE // heads)
    source = torch.Generator().manual_seed(7)
    mean = torch.randn(_COMMON["num_hidden_layers"], heads, size, generator=source)
    length = mean.unflatten(-1, (2, -1)).norm(dim=2) * 1.3 + 0.2
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "centres.npz"
    Centres(mean, length).write(file)
    return file
