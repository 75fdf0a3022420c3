# SPDX-License-Identifier: Apache-2.0
"""Models given by their shape. Speed does not depend on the weights, so random ones are enough."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_pyramid.frontend.cache_shape import CACHE_BYTES, DTYPE_BYTES, row_bytes
from vllm_pyramid.frontend.model_shape import longest_of_model, shape_of_model
from vllm_pyramid.tools.demo import model_path

BLOCK_SIZE = 16  # tokens of a KV cache block in every engine of the bench


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model, in elements.

    Attributes:
        positions: the longest sequence.
        dtype: of the weights. cache_dtype: of K and V in the cache, if another, as vLLM calls it.
    """

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int = 32768
    dtype: str = "bfloat16"
    cache_dtype: str | None = None

    def served_as(self, engine_args: Mapping[str, Any]) -> Shape:
        """Return the shape with an engine's types; ValueError: unknown names of types."""
        dtype = str(engine_args.get("dtype", "auto")).removeprefix("torch.")
        dtype = {"auto": self.dtype, "half": "float16", "float": "float32"}.get(dtype, dtype)
        cache = str(engine_args.get("kv_cache_dtype", "auto"))
        for name, given, known in (
            ("dtype", dtype, DTYPE_BYTES),
            ("kv_cache_dtype", cache, ("auto", *CACHE_BYTES)),
        ):
            if given not in known:
                raise ValueError(
                    f"--engine-args: {name} is {given!r}, not one of {', '.join(known)}"
                )
        return replace(self, dtype=dtype, cache_dtype=None if cache == "auto" else cache)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * row_bytes(self.head_size, self.cache_dtype or self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer."""
        return BLOCK_SIZE * self.token_bytes


# Layers, hidden, MLP, query heads, KV heads, head size, vocabulary, positions.
SHAPES = {
    "small": Shape(8, 512, 1408, 8, 4, 64, 8192),
    # The model's 8,192 positions, and room for answers to prompts of that length.
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152, 8704),
    "llama-3-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "llama-3-70b": Shape(80, 8192, 28672, 64, 8, 128, 128256, 131072),
}


def named_shape(name: str, layers: int | None) -> Shape:
    """Return a shape of `SHAPES`, with another number of layers if one is given."""
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, layers=layers)


def write_model(shape: Shape, folder: Path) -> None:
    """Write a model that vLLM loads with `load_format="dummy"`, with the built-in tokenizer.

    Its tokens are the first of the vocabulary: prompts of random token ids can be sent as text.
    """
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        rope_theta=500000.0,
        bos_token_id=0,
        eos_token_id=1,
        dtype=shape.dtype,
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(model_path()) / name, folder / name)


def shape_of_config(model: str) -> Shape:
    """Return the shape of a model from its configuration; ValueError: it has no such shape."""
    from transformers import AutoConfig

    cache, _ = shape_of_model(model, None)
    if cache.layers:
        raise ValueError(
            f"the bench knows decoders in which every layer has full attention; of {model!r} "
            "only some have: scripts/bench_hybrid.py compares such models with stock vLLM"
        )
    config = AutoConfig.from_pretrained(model).get_text_config()
    mlp = getattr(config, "intermediate_size", None)
    experts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts")]
    if mlp is None or any(experts):
        raise ValueError(
            f"the bench knows decoders with one MLP a layer; the configuration of {model!r} "
            "has experts or does not say the MLP's size"
        )
    return Shape(
        layers=cache.num_layers,
        hidden=config.hidden_size,
        mlp=mlp,
        heads=config.num_attention_heads,
        kv_heads=cache.num_kv_heads,
        head_size=cache.head_size,
        vocabulary=config.vocab_size,
        positions=longest_of_model(model) or 1 << 30,
        dtype=cache.dtype,
    )
