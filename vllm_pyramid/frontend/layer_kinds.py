# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model keeps, from its Transformers configuration."""

from __future__ import annotations

from typing import Any

FULL, SLIDING, CHUNKED, STATE, NO_CACHE = "full", "sliding", "chunked", "state", "none"
BOTH = "full and state"  # full attention and a state in one layer: Falcon-H1, Zamba 2
# Names of layers in Transformers configurations.
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
# Families whose window counts the tokens before the query; vLLM counts the query too.
_ONE_MORE = ("cohere2", "cohere2_moe")


def layer_kinds(text_config: Any, longest: int | None = None) -> list[str]:
    """Return the kind of each layer, reading a Transformers configuration as vLLM does.

    Args:
        longest: tokens of a sequence at most, if known; a window or chunk of that length counts as
            full attention.
    """
    kinds = _named_kinds(text_config)
    for layer, kind in enumerate(kinds):
        if kind in _SEES:
            sees = tokens_seen(text_config, kind, layer)
            if not sees or (longest is not None and sees >= longest):
                kinds[layer] = FULL
    return kinds


def _named_kinds(config: Any) -> list[str]:
    count = int(getattr(config, "num_hidden_layers", 0))
    family = getattr(config, "model_type", "")
    if family == "gpt_oss":  # vLLM uses the layer's number and ignores `layer_types`
        return [FULL if layer % 2 else SLIDING for layer in range(count)]
    if family == "llama4_text":  # vLLM uses the rotary positions
        return [CHUNKED if rotates else FULL for rotates in config.no_rope_layers][:count]
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if found := getattr(config, name, None):
            return [_KINDS.get(kind, STATE) for kind in found][:count]
    slides = getattr(config, "use_sliding_window", True)
    return [SLIDING if slides else FULL] * count


def tokens_seen(config: Any, kind: str, layer: int) -> int:
    """Return how many tokens a layer attends to, the query included; 0 for all."""
    try:
        sees = getattr(config, _SEES[kind], None)
    except RuntimeError:  # raised by Transformers if layers differ
        sees = getattr(config.per_layer_config[layer], _SEES[kind], None)
    if not sees:
        return 0
    return int(sees) + (kind == SLIDING and getattr(config, "model_type", "") in _ONE_MORE)


def has_states(text_config: Any, longest: int | None = None) -> bool:
    """Return whether layers of a model have a state, with or without attention."""
    return not {STATE, BOTH}.isdisjoint(layer_kinds(text_config, longest))


def has_other_layers(text_config: Any, longest: int) -> bool:
    """Return whether some layers keep anything other than the KV of all tokens."""
    return any(kind not in (FULL, NO_CACHE) for kind in layer_kinds(text_config, longest))
