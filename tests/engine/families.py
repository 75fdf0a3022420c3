# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of families whose layers are not all full attention, or not all dense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 512
HIDDEN_SIZE = 128
# Tokens that a layer with a sliding window sees.
WINDOW = 64
# Standard deviation of the attention logits, so that a few keys lead in every head.
LOGIT_STD = 1.5


@dataclass(frozen=True)
class Family:
    """One tiny model.

    Attributes:
        model: the class of the model in Transformers; its configuration's name is made of it
            unless `config` says another.
        options: the configuration beyond `_COMMON`.
        full_layers: numbers of the layers in the model that have full attention.
        other_layers: what the other layers are: "sliding", "chunked", "mamba2", ... ("": none).
        config: the configuration's class where its name does not follow from `model`.
        notes: what is special about it.
        scaled_embeddings: the model itself multiplies embeddings by the root of the hidden size.
        tied_embeddings: embeddings are the output's weights too: small ones, or tokens repeat.
        head_norm: weight of the norms of queries and keys; 0: the root of `LOGIT_STD`.
        last_norm: weight of the norm before the output.
    """

    model: str
    options: dict[str, Any]
    full_layers: tuple[int, ...]
    other_layers: str = ""
    config: str = ""
    notes: str = ""
    scaled_embeddings: bool = False
    tied_embeddings: bool = False
    head_norm: float = 0.0
    last_norm: float = 1.0


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_HEADS: dict[str, Any] = {"head_dim": 32}


def _two_to_one(companion: str) -> list[str]:
    return [companion, companion, "full_attention"] * 2


_SLIDES: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": _two_to_one("sliding_attention"),
}
_IN_TURN = {**_SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 3}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA: dict[str, Any] = {"scaled_embeddings": True, "tied_embeddings": True, "last_norm": 15.0}


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {**_HEADS, "query_pre_attn_scalar": 32, **_SLIDES},
        (2, 5),
        "sliding",
        config="Gemma3TextConfig",
        notes="another rotary base in each kind of layer",
        **_GEMMA,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {**_HEADS, **_LOCAL_EXPERTS, **_IN_TURN},
        (1, 3, 5),
        "sliding",
        notes="a learned sink for each query head; a mixture of experts in every layer; vLLM "
        "takes every other layer for full attention, whatever `layer_types` says",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_HEADS,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 10.0,
            **_IN_TURN,
        },
        (1, 3, 5),
        "sliding",
        notes="caps on the attention logits, low enough to matter, and on the output's",
        **_GEMMA,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {"logit_scale": 1.25, **_SLIDES},
        (2, 5),
        "sliding",
        notes="no rotary positions in layers with full attention; attention beside the MLP",
        tied_embeddings=True,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _SLIDES,
        (2, 5),
        "sliding",
        notes="vLLM runs the model of Transformers; norms behind attention and MLP",
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {
            **_HEADS,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "layer_types": _two_to_one("sliding_attention"),
        },
        (2, 5),
        "sliding",
        notes="no rotary positions in layers with full attention; norms behind attention and MLP",
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            **_HEADS,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1, 1, 0],
            "layer_types": _two_to_one("chunked_attention"),
            "attention_chunk_size": 128,
            "floor_scale": 8192,
        },
        (2, 5),
        "chunked",
        config="Llama4TextConfig",
        notes="no rotary positions in layers with full attention; every other MLP is a mixture; "
        "vLLM needs chunks that are a multiple of its block, which is of 128 tokens on a CPU",
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {
            **_HEADS,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 10.0,
            **_SLIDES,
        },
        (2, 5),
        "sliding",
        config="Gemma4TextConfig",
        notes="heads of 64 in layers with full attention, of 32 in the others",
        **_GEMMA,
        head_norm=0.5,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**_LOCAL_EXPERTS, "sliding_window": None},
        (0, 1, 2, 3, 4, 5),
        notes="a mixture of experts in every layer",
    ),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        {**_HEADS, **_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [3]},
        (0, 1, 2, 3, 4, 5),
        notes="a mixture of experts in every layer but one",
    ),
    "granite4": Family(
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": _two_to_one("linear_attention"),
            "shared_intermediate_size": 128,
            **_LOCAL_EXPERTS,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.8,
        },
        (2, 5),
        "mamba2",
        notes="no positions at all; a mixture of experts beside a shared MLP in every layer",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {
            "layer_types": _two_to_one("conv"),
            "block_auto_adjust_ff_dim": False,
            "block_dim": HIDDEN_SIZE,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "conv_dim": HIDDEN_SIZE,
        },
        (2, 5),
        "short convolution",
        notes="vLLM reads `conv_dim` and `block_dim`, as released checkpoints have them; on a "
        "CPU it turns queries and keys wrongly without `custom_ops=['all', '-rotary_embedding']`",
        tied_embeddings=True,
        last_norm=1.25,
    ),
    "nemotron-h": Family(
        "NemotronHForCausalLM",
        {
            **_HEADS,
            "layers_block_type": [*["linear_attention", "mlp", "full_attention"] * 2, "mlp"],
            "num_hidden_layers": 7,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 32,
        },
        (2, 5),
        "mamba2",
        notes="MLPs are layers of their own, without a cache; vLLM has no mixture of this "
        "family's experts (one matrix in, none to gate) for a CPU",
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        {
            **_HEADS,
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            "final_logit_softcapping": 10.0,
            "sliding_window": WINDOW,
            "layer_types": [*_SLIDES["layer_types"], "sliding_attention", "full_attention"],
        },
        (2, 5, 7),
        "sliding",
        config="Gemma3nTextConfig",
        notes="the last two layers read the caches of layers 4 and 5",
        **_GEMMA,
        head_norm=0.5,
    ),
    "qwen3-next": Family(
        "Qwen3NextForCausalLM",
        {
            **_HEADS,
            "layer_types": _two_to_one("linear_attention"),
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            **_EXPERTS,
            "shared_expert_intermediate_size": 128,
        },
        (2, 5),
        "gated delta rule",
        notes="gated attention; a mixture of experts in every layer; bfloat16 only on a CPU",
    ),
}


def make_family(name: str, folder: Path) -> Path:
    """Write the model `name` of `FAMILIES` into `folder` in float32, without a tokenizer."""
    import torch
    import transformers

    family = FAMILIES[name]
    config_class = family.config or family.model.replace("ForCausalLM", "Config")
    settings = {**_COMMON, "tie_word_embeddings": family.tied_embeddings, **family.options}
    config = getattr(transformers, config_class)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240604)
        model = getattr(transformers, family.model)(config)
    generator = torch.Generator().manual_seed(20240604)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            _fill(family, key, weight, generator)
    model.save_pretrained(folder)
    return folder


def _fill(family: Family, key: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Random values for one weight: what is normed stays near 1, nothing is left at 0 or 1."""
    import torch

    noise = torch.empty_like(weight).normal_(0.0, 1.0, generator=generator)
    if "sinks" in key:
        weight.copy_(1.0 + noise)
    elif "dt_bias" in key or "dt_proj.bias" in key:
        weight.copy_(noise - 3.0)  # states that last some tens of tokens
    elif "A_log" in key or key.endswith(".D"):
        weight.add_(noise, alpha=0.2)
    elif "norm" in key and weight.dim() == 1:
        level = 1.0
        if any(part in key for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
            level = family.head_norm or math.sqrt(LOGIT_STD)
        elif key in ("model.norm.weight", "model.embedding_norm.weight"):
            level = family.last_norm
        starts_at = 0.0 if weight.mean() < 0.5 else 1.0  # some families add 1 themselves
        weight.copy_(level - 1.0 + starts_at + 0.1 * noise)
    elif weight.dim() == 1 or key.endswith("bias"):
        weight.copy_(0.3 * noise)
    else:
        weight.copy_(noise * _std(family, key, weight))


def _std(family: Family, key: str, weight: torch.Tensor) -> float:
    if "embed_tokens" in key:
        std = 0.1 if family.tied_embeddings else 0.3
        return std / math.sqrt(HIDDEN_SIZE) if family.scaled_embeddings else std
    if "q_proj" in key or "k_proj" in key:
        return math.sqrt(LOGIT_STD / weight.shape[1])
    if "conv" in key:
        return float(weight.shape[-1] ** -0.5)
    if weight.dim() == 3:  # experts, in whichever order a family stores its matrices
        inputs = weight[0].numel() // HIDDEN_SIZE if "down_proj" in key else HIDDEN_SIZE
        return float(inputs**-0.5)
    return float(weight.shape[1] ** -0.5)
