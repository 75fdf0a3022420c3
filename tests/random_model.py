# SPDX-License-Identifier: Apache-2.0
"""A small Llama with random weights and a real tokenizer, on which most engine tests run.

Untrained on purpose: its attention is spread over many tokens and its answers hang on all of them,
so that a wrong token kept or a wrong position shows at once. Deterministic: weights come from a
seeded NumPy generator, the tokenizer is trained on the text behind Python's `help()`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
BEGIN, END, PAD = SPECIAL_TOKENS[0], SPECIAL_TOKENS[1], SPECIAL_TOKENS[5]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes. Defaults: 6.3 million parameters, 13 MB in bfloat16."""

    num_layers: int = 8
    hidden_size: int = 256
    head_size: int = 32
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 688
    vocab_size: int = 2048
    max_length: int = 8192
    seed: int = 20240604
    # Standard deviation of the attention logits (after scaling). Near 0 attention is uniform and
    # every token is as good as any other; the larger it is, the more one rounding error changes
    # what follows. At 1.5 a few tokens lead in each head, and bfloat16 still follows float32.
    attention_logit_std: float = 1.5


def write_model(folder: Path, shape: Shape, corpus: Sequence[str]) -> None:
    """Write weights, configuration and tokenizer into an existing, empty folder."""
    from safetensors.torch import save_file

    weights = random_weights(shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    token_ids = _write_tokenizer(folder, shape, corpus)
    _write_json(folder / "config.json", _model_config(shape, token_ids))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": token_ids[BEGIN],
            "eos_token_id": token_ids[END],
            "pad_token_id": token_ids[PAD],
        },
    )


def random_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """Seeded random weights in bfloat16 under the names of `LlamaForCausalLM`.

    With inputs of unit variance a query or key component has variance `hidden * std^2`, so a
    scaled attention logit has standard deviation `hidden * std_q * std_k`: this is set to
    `attention_logit_std`. The embeddings, tied to the output, are small beside what the layers
    add, or the model would only repeat its last token whatever the cache holds.
    """
    import numpy as np
    import torch

    # NumPy's generator gives the same bits on every machine; torch's depends on the vector unit.
    generator = np.random.Generator(np.random.PCG64(shape.seed))

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        values = generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)
        return torch.from_numpy(values).to(torch.bfloat16)

    hidden, mlp = shape.hidden_size, shape.intermediate_size
    query_size = shape.num_heads * shape.head_size
    kv_size = shape.num_kv_heads * shape.head_size
    std_query_key = math.sqrt(shape.attention_logit_std / hidden)
    residual = 1.0 / math.sqrt(2.0)

    weights = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden, 0.1)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": normal(query_size, hidden, std_query_key),
            prefix + "self_attn.k_proj.weight": normal(kv_size, hidden, std_query_key),
            prefix + "self_attn.v_proj.weight": normal(kv_size, hidden, hidden**-0.5),
            prefix + "self_attn.o_proj.weight": normal(
                hidden, query_size, residual * query_size**-0.5
            ),
            prefix + "mlp.gate_proj.weight": normal(mlp, hidden, hidden**-0.5),
            prefix + "mlp.up_proj.weight": normal(mlp, hidden, hidden**-0.5),
            prefix + "mlp.down_proj.weight": normal(hidden, mlp, residual * mlp**-0.5),
            prefix + "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return weights


def _model_config(shape: Shape, token_ids: dict[str, int]) -> dict[str, Any]:
    return {
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
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": token_ids[BEGIN],
        "eos_token_id": token_ids[END],
        "pad_token_id": token_ids[PAD],
    }


def _write_tokenizer(folder: Path, shape: Shape, corpus: Sequence[str]) -> dict[str, int]:
    """Train the byte-level BPE, write its files, return the ids of the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    if tokenizer.get_vocab_size() != shape.vocab_size:
        raise RuntimeError(
            f"the text gave only {tokenizer.get_vocab_size()} tokens, not {shape.vocab_size}: it "
            "is too short to train the demonstration tokenizer"
        )
    vocabulary = tokenizer.get_vocab()
    token_ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, token_ids[BEGIN])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
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
    return token_ids


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
