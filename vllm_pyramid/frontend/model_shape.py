# SPDX-License-Identifier: Apache-2.0
"""Read the shape of a model's KV cache from its configuration, without its weights."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_pyramid.frontend.cache_shape import (
    CACHE_BYTES,
    DTYPE_BYTES,
    CacheShape,
    OtherLayers,
    row_bytes,
)
from vllm_pyramid.frontend.layer_kinds import (
    BOTH,
    FULL,
    NO_CACHE,
    STATE,
    layer_kinds,
    tokens_seen,
)


def shape_of_model(model: str, dtype: str | None) -> tuple[CacheShape, str]:
    """Return the cache of a model from its configuration, and a sentence on its source.

    Raises:
        ValueError: no readable configuration, or a cache that is not K and V per head.
    """
    if model.startswith(("/", ".")) and not (Path(model) / "config.json").is_file():
        raise ValueError(f"there is no config.json in the folder {model!r}")
    config = _config_of(model)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{model!r} uses multi-head latent attention (kv_lora_rank {config.kv_lora_rank}): it "
            "has no keys and values per head to choose from"
        )
    name = dtype or str(getattr(config, "dtype", None)).removeprefix("torch.")
    if name not in CACHE_BYTES:
        raise ValueError(
            f"{model!r} names no data type that a cache can have ({name}): give --dtype, "
            f"one of {', '.join(sorted(CACHE_BYTES))}"
        )
    return _shape_of_config(model, config, name)


def _config_of(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot read the configuration of {model!r}: {reason}") from error


def _shape_of_config(model: str, config: Any, dtype: str) -> tuple[CacheShape, str]:
    longest = getattr(config, "max_position_embeddings", None)
    kinds = layer_kinds(config, None if longest is None else int(longest))
    readers = int(getattr(config, "num_kv_shared_layers", None) or 0)
    own = kinds[: len(kinds) - readers]
    layers = tuple(layer for layer, kind in enumerate(own) if kind in (FULL, BOTH))
    if not layers:
        raise ValueError(f"{model!r} has no layer with full attention")
    heads = [_heads(config, layer) for layer in layers]
    if len({number * size for number, size in heads}) > 1:
        raise ValueError(
            f"the layers of {model!r} with full attention have caches of different sizes, which no "
            "KV policy can manage yet"
        )

    def other_layer(layer: int, kind: str) -> tuple[str, int, int]:
        if kind in (STATE, BOTH):
            return STATE, 0, 0
        number, size = _heads(config, layer)
        return kind, tokens_seen(config, kind, layer), 2 * number * row_bytes(size, dtype)

    others = Counter(
        other_layer(layer, kind) for layer, kind in enumerate(own) if kind not in (FULL, NO_CACHE)
    )
    some = len(layers) < len(kinds)
    note = f": only its {len(layers)} full-attention layers of {len(kinds)} evict"
    shape = CacheShape(
        num_layers=len(layers),
        num_kv_heads=heads[0][0],
        head_size=heads[0][1],
        dtype=dtype,
        layers=layers if some or others else (),
        other_layers=tuple(
            OtherLayers(kind, count, sees, token_bytes)
            for (kind, sees, token_bytes), count in others.items()
        ),
        readers=readers,
    )
    return shape, model + (note if some else "")


def _heads(config: Any, layer: int) -> tuple[int, int]:
    """Return the KV heads of a layer and their size, which differs between Gemma 4's layers."""
    config = config.per_layer_config[layer]
    heads = config.num_attention_heads
    number = getattr(config, "num_key_value_heads", None) or heads
    return number, getattr(config, "head_dim", None) or config.hidden_size // heads


def with_drafts(shape: CacheShape, model: str | None, speculation: dict[str, Any]) -> CacheShape:
    """Add the cache of a draft model, an EAGLE head or one MTP module to a model's cache.

    Raises:
        ValueError: the draft model's configuration cannot be read.
    """
    draft = speculation.get("model")
    if speculation.get("method") == "mtp":
        draft, layers = model, 1
    elif draft is None or speculation.get("method") in ("ngram", "ngram_gpu", "suffix", "medusa"):
        return shape  # these have no cache
    else:
        layers = 0
    if draft is None:
        raise ValueError("--speculative-config with the method mtp needs a --model: name it")
    config = _config_of(str(draft))
    number, size = _heads(config, int(config.num_hidden_layers) - 1)
    token_bytes = 2 * number * row_bytes(size, shape.dtype)
    own = OtherLayers(FULL, layers or int(config.num_hidden_layers), token_bytes=token_bytes)
    return replace(shape, other_layers=(*shape.other_layers, own))


def state_block_size(model: str, dtype: str) -> int:
    """Return the block size that vLLM chooses for a model with states on this machine.

    vLLM makes the blocks of attention at least as large as a state's page. No weights are read.

    Raises:
        ValueError: vLLM is missing or does not know this model, or the cache's type is not the
            model's.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError("vLLM only tells it for caches of the model's own type: give --block-size")
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # vLLM logs to standard output
    try:
        return _state_block_size(model, dtype)
    except Exception as error:  # vLLM's checks of a model fail in many ways
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(reason) from error
    finally:
        logging.disable(disabled)


def _state_block_size(model: str, dtype: str) -> int:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    config = EngineArgs(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]  # checked above: a key of DTYPE_BYTES
        skip_tokenizer_init=True,
        additional_config={"kv_policy": "full"},
    ).create_engine_config()
    model_config, smallest = config.model_config, config.cache_config.block_size
    found: Any = ModelRegistry.resolve_model_cls(model_config.architecture, model_config)[0]
    page = MambaSpec(
        block_size=1,
        shapes=found.get_mamba_state_shape_from_config(config),
        dtypes=found.get_mamba_state_dtype_from_config(config),
    ).page_size_bytes
    heads = model_config.get_total_num_kv_heads()
    bytes_of_block = 2 * smallest * heads * model_config.get_head_size() * DTYPE_BYTES[dtype]
    # Like `_align_hybrid_block_size` of vLLM's platforms, which needs the model's layers.
    return int(smallest * -(-page // bytes_of_block))


def longest_of_model(model: str) -> int | None:
    """Return the greatest length of a sequence in a model's configuration, or None.

    Raises:
        ValueError: there is no readable configuration.
    """
    config = _config_of(model)
    longest = getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)
