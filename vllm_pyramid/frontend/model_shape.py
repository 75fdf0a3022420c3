# SPDX-License-Identifier: Apache-2.0
"""The size of a model's KV cache, from its configuration alone."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Of KV caches: bytes of a number, and of the scale beside those of one token and KV head.
CACHE_BYTES = {
    **{name: (size, 0) for name, size in DTYPE_BYTES.items()},
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), (1, 0)),
    **dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), (1, 4)),
}


FULL, SLIDING, CHUNKED, STATE, NO_CACHE = "full", "sliding", "chunked", "state", "none"
BOTH = "full and state"  # attention beside a state in one layer: Falcon-H1, Zamba 2
# What configurations call their layers.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "*": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "hybrid": BOTH,
    "mlp": NO_CACHE,
    "moe": NO_CACHE,
    "-": NO_CACHE,
    "E": NO_CACHE,
}
_SEES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
# Families whose window counts the tokens before the one that looks; vLLM counts that one too.
_ONE_MORE = ("cohere2", "cohere2_moe")


def layer_kinds(text_config: Any, longest: int | None = None) -> list[str]:
    """What each layer of a model keeps, by a Transformers configuration, as vLLM reads it.

    Args:
        longest: tokens of a sequence at most, if known: a window or chunk as long as that is none.

    Returns:
        A kind a layer: `FULL`, `SLIDING`, `CHUNKED`, `STATE` (of any sort), `BOTH`, `NO_CACHE`.
    """
    kinds = _named_kinds(text_config)
    for layer, kind in enumerate(kinds):
        if kind in _SEES:
            sees = _sees(text_config, kind, layer)
            if not sees or (longest is not None and sees >= longest):
                kinds[layer] = FULL
    return kinds


def _named_kinds(config: Any) -> list[str]:
    count = int(getattr(config, "num_hidden_layers", 0))
    family = getattr(config, "model_type", "")
    if family == "gpt_oss":  # vLLM goes by the layer's number, whatever `layer_types` says
        return [FULL if layer % 2 else SLIDING for layer in range(count)]
    if family == "llama4_text":  # vLLM goes by the rotary positions
        return [CHUNKED if rotates else FULL for rotates in config.no_rope_layers][:count]
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if found := getattr(config, name, None):
            return [_KINDS.get(kind, STATE) for kind in found][:count]
    slides = getattr(config, "use_sliding_window", True)
    return [SLIDING if slides else FULL] * count


def _sees(config: Any, kind: str, layer: int) -> int:
    """Tokens that a layer looks at, itself among them; 0 for all."""
    try:
        sees = getattr(config, _SEES[kind], None)
    except RuntimeError:  # Transformers: it is not the same in all layers
        sees = getattr(config.per_layer_config[layer], _SEES[kind], None)
    if not sees:
        return 0
    return int(sees) + (kind == SLIDING and getattr(config, "model_type", "") in _ONE_MORE)


def has_states(text_config: Any, longest: int | None = None) -> bool:
    """Whether layers of a model keep a state, alone or beside attention; see `layer_kinds`."""
    return not {STATE, BOTH}.isdisjoint(layer_kinds(text_config, longest))


def has_other_layers(text_config: Any, longest: int) -> bool:
    """Whether some layers keep anything else than the KV of all tokens.

    Args:
        longest: tokens of a sequence at most; no window or chunk as long as that counts.
    """
    return any(kind not in (FULL, NO_CACHE) for kind in layer_kinds(text_config, longest))


@dataclass(frozen=True)
class OtherLayers:
    """Layers of one kind that do not evict.

    Attributes:
        kind: `SLIDING`, `CHUNKED`, `STATE`, or `FULL`: a draft model's. layers: how many.
        sees: tokens of a window or chunk.
        token_bytes: of K and V of a token in one layer; 0 of a state: its size is known to vLLM.
    """

    kind: str
    layers: int
    sees: int = 0
    token_bytes: int = 0

    def tokens(self, length: int, block_size: int) -> int:
        """Tokens of whole blocks that one layer holds of so many at most, while it decodes."""
        if self.kind == FULL:
            return -(-length // block_size) * block_size
        # A window may begin inside a block; so may a chunk that is not made of whole blocks.
        inside = self.kind == SLIDING or self.sees % block_size > 0
        most = -(-self.sees // block_size) + inside
        return min(-(-length // block_size), most) * block_size


@dataclass(frozen=True)
class CacheShape:
    """What the size of a model's KV cache depends on.

    Attributes:
        num_layers: layers with full attention. num_kv_heads: KV heads of each.
        head_size: elements of a head. dtype: of K and V, one of `CACHE_BYTES`.
        layers: the model's own numbers of these layers; empty: from 0 on.
        companions: other layers with something to keep. readers: layers that read others' caches.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    layers: tuple[int, ...] = ()
    other_layers: tuple[OtherLayers, ...] = ()
    readers: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of one block of one layer."""
        return 2 * block_size * self.num_kv_heads * row_bytes(self.head_size, self.dtype)

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, whose size only vLLM knows."""
        return any(kind.kind == STATE for kind in self.other_layers)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of the pool, which all layers share: the largest of any layer.

        Args:
            block_size: tokens, as `--block-size` says it.
        """
        largest = max((kind.token_bytes for kind in self.other_layers), default=0)
        return max(self.block_bytes(block_size), block_size * largest)

    def tokens_of_block(self, block_size: int, token_bytes: int | None = None) -> int:
        """Tokens of a layer's block: vLLM fills a page with more tokens, or else pads it.

        Args:
            block_size: as `--block-size` says it. token_bytes: of the layer; None: one that evicts.
        """
        own = self.block_bytes(block_size) if token_bytes is None else block_size * token_bytes
        page = self.page_bytes(block_size)
        return block_size if page % own else block_size * (page // own)


def row_bytes(head_size: int, dtype: str) -> int:
    """Bytes of K, or of V, of one token and KV head in a cache of a type of `CACHE_BYTES`."""
    number, scale = CACHE_BYTES[dtype]
    return head_size * number + scale


def shape_of_model(model: str, dtype: str | None) -> tuple[CacheShape, str]:
    """The cache of a model from its configuration, and a sentence on where it comes from.

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
            f"{model!r} does not say a data type that the cache can have ({name}): give --dtype, "
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

    def companion(layer: int, kind: str) -> tuple[str, int, int]:
        if kind in (STATE, BOTH):
            return STATE, 0, 0
        number, size = _heads(config, layer)
        return kind, _sees(config, kind, layer), 2 * number * row_bytes(size, dtype)

    beside = Counter(
        companion(layer, kind) for layer, kind in enumerate(own) if kind not in (FULL, NO_CACHE)
    )
    some = len(layers) < len(kinds)
    note = f": only its {len(layers)} full-attention layers of {len(kinds)} evict"
    shape = CacheShape(
        num_layers=len(layers),
        num_kv_heads=heads[0][0],
        head_size=heads[0][1],
        dtype=dtype,
        layers=layers if some or beside else (),
        other_layers=tuple(
            OtherLayers(kind, count, sees, token_bytes)
            for (kind, sees, token_bytes), count in beside.items()
        ),
        readers=readers,
    )
    return shape, model + (note if some else "")


def _heads(config: Any, layer: int) -> tuple[int, int]:
    """KV heads of a layer, and their size; Gemma 4 has others where attention is full."""
    config = config.per_layer_config[layer]
    heads = config.num_attention_heads
    number = getattr(config, "num_key_value_heads", None) or heads
    return number, getattr(config, "head_dim", None) or config.hidden_size // heads


def with_drafts(shape: CacheShape, model: str | None, speculation: dict[str, Any]) -> CacheShape:
    """A model's cache with that of what drafts for it: a model, an EAGLE head, one MTP module.

    Args:
        speculation: `--speculative-config`: `method`, and `model` where it has a folder of its own.

    Raises:
        ValueError: no configuration of it can be read.
    """
    draft = speculation.get("model")
    if speculation.get("method") == "mtp":
        draft, layers = model, 1
    elif draft is None or speculation.get("method") in ("ngram", "ngram_gpu", "suffix", "medusa"):
        return shape  # nothing that is kept
    else:
        layers = 0
    if draft is None:
        raise ValueError("--speculative-config with the method mtp is about a --model: name it")
    config = _config_of(str(draft))
    number, size = _heads(config, int(config.num_hidden_layers) - 1)
    token_bytes = 2 * number * row_bytes(size, shape.dtype)
    own = OtherLayers(FULL, layers or int(config.num_hidden_layers), token_bytes=token_bytes)
    return replace(shape, other_layers=(*shape.other_layers, own))


def state_block_size(model: str, dtype: str) -> int:
    """Tokens of a block where layers keep states, as vLLM chooses it with a policy on this machine.

    vLLM makes the blocks of attention at least as large as a state's page. No weights are read.

    Raises:
        ValueError: vLLM is missing, or does not know this model, or the cache is not of the
            model's type.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError("vLLM is asked for caches of the model's type alone: give --block-size")
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what vLLM reports of an engine goes to standard output
    try:
        return _state_block_size(model, dtype)
    except Exception as error:  # vLLM's own checks of any model, which fail in many ways
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
        dtype=dtype,  # type: ignore[arg-type]
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
    # As `_align_hybrid_block_size` of vLLM's platforms, which wants the model's layers.
    return int(smallest * -(-page // bytes_of_block))


def longest_of_model(model: str) -> int | None:
    """The most tokens that a model takes, by its configuration; None if it does not say.

    Raises:
        ValueError: there is no readable configuration.
    """
    config = _config_of(model)
    longest = getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)
