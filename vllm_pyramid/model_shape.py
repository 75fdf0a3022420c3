# SPDX-License-Identifier: Apache-2.0
"""The size of a model's KV cache, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DTYPE_BYTES", "CacheShape", "longest_of_model", "shape_of_model"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class CacheShape:
    """What the size of a model's KV cache depends on.

    Attributes:
        num_layers: layers with full attention. num_kv_heads: KV heads a layer.
        head_size: elements of a head. dtype: of K and V.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of one block of one layer."""
        return 2 * block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


def shape_of_model(model: str, dtype: str | None) -> tuple[CacheShape, str]:
    """The cache of a model from its configuration, and a sentence on where it comes from.

    Raises:
        ValueError: no readable configuration, or a cache that is not K and V per head.
    """
    if model.startswith(("/", ".")) and not (Path(model) / "config.json").is_file():
        raise ValueError(f"there is no config.json in the folder {model!r}")

    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot read the configuration of {model!r}: {reason}") from error
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{model!r} uses multi-head latent attention (kv_lora_rank {config.kv_lora_rank}): it "
            "has no keys and values per head to choose from"
        )
    heads = config.num_attention_heads
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    note = f"{model}"
    if kinds and any(kind != "full_attention" for kind in kinds):
        layers = sum(kind == "full_attention" for kind in kinds)
        note += f": only its {layers} full-attention layers of {len(kinds)} are counted"
        if not layers:
            raise ValueError(f"{model!r} has no layer with full attention")
    name = dtype or str(getattr(config, "dtype", None)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(
            f"{model!r} does not say a data type that the cache can have ({name}): give --dtype, "
            f"one of {', '.join(sorted(DTYPE_BYTES))}"
        )
    shape = CacheShape(
        num_layers=layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=name,
    )
    return shape, note


def longest_of_model(model: str) -> int | None:
    """The most tokens that a model takes, by its configuration; None if it does not say.

    Raises:
        ValueError: there is no readable configuration.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot read the configuration of {model!r}: {reason}") from error
    longest = getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)
