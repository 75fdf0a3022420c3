# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of the cache, for models of many families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from tests.engine.families import _COMMON, FAMILIES, WINDOW
from vllm_pyramid.frontend.cache_shape import CacheShape, OtherLayers
from vllm_pyramid.frontend.layer_kinds import CHUNKED, SLIDING, STATE, has_other_layers, has_states
from vllm_pyramid.frontend.model_shape import shape_of_model, state_block_size

KINDS = {"sliding": SLIDING, "chunked": CHUNKED}


@pytest.mark.parametrize("name", FAMILIES)
def test_shape_of_a_family(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    config_class = family.config or family.model.replace("ForCausalLM", "Config")
    config = getattr(transformers, config_class)(**{**_COMMON, **family.options})
    config.save_pretrained(tmp_path)
    shape, note = shape_of_model(str(tmp_path), "float32")
    readers = getattr(config, "num_kv_shared_layers", 0) or 0
    own = config.num_hidden_layers - readers
    layers = tuple(layer for layer in family.full_layers if layer < own)
    assert shape.num_layers == len(layers)
    assert shape.layers == (() if len(layers) == config.num_hidden_layers else layers)
    assert shape.readers == readers
    assert (shape.num_kv_heads, shape.head_size) == (2, 64 if name == "gemma4" else 32)
    assert ("evict" in note) == bool(shape.layers)
    if not family.other_layers:
        assert shape.other_layers == ()
        return
    (companion,) = shape.other_layers
    assert companion.kind == KINDS.get(family.other_layers, STATE)
    if companion.kind != STATE:
        assert companion.layers == own - len(layers)
        assert companion.sees == {"llama4": 2 * WINDOW, "cohere2": WINDOW + 1}.get(name, WINDOW)
        assert companion.token_bytes == 2 * 2 * 32 * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_companions(name: str) -> None:
    family = FAMILIES[name]
    config_class = family.config or family.model.replace("ForCausalLM", "Config")
    config = getattr(transformers, config_class)(**{**_COMMON, **family.options})
    assert has_other_layers(config, 512) == bool(family.other_layers)
    states = bool(family.other_layers) and family.other_layers not in KINDS
    assert has_other_layers(config, WINDOW) == states, "a window that no sequence is longer than"
    assert has_states(config, 512) == states


def test_what_a_window_holds() -> None:
    window = OtherLayers(SLIDING, layers=3, sees=64, token_bytes=1)
    assert [window.tokens(length, 16) for length in (1, 16, 40, 80, 8192)] == [16, 16, 48, 80, 80]


def test_what_chunks_hold() -> None:
    chunk = OtherLayers(CHUNKED, layers=3, sees=64, token_bytes=1)
    assert [chunk.tokens(length, 16) for length in (1, 40, 64, 8192)] == [16, 48, 64, 64]
    assert chunk.tokens(8192, 48) == 3 * 48, "chunks that begin inside blocks"


def every(period: int, count: int, first: int | None = None) -> tuple[int, ...]:
    return tuple(range(period - 1 if first is None else first, count, period))


# Layers that evict, KV heads and their size, and the others: kind, layers, tokens seen, KV width.
RELEASED: list[tuple[str, dict[str, Any], Any, Any, Any]] = [
    ("JambaConfig", {}, every(8, 32, 4), (8, 128), [(STATE, 28, 0, 0)]),
    (
        "NemotronHConfig",
        {"hybrid_override_pattern": "M-M*-ME*", "num_key_value_heads": 2, "head_dim": 64},
        (3, 7),
        (2, 64),
        [(STATE, 3, 0, 0)],
    ),
    (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "num_key_value_heads": 8,
        },
        (1, 3),
        (8, 128),
        [(STATE, 2, 0, 0)],
    ),
    (
        "Lfm2Config",
        {"num_hidden_layers": 4, "full_attn_idxs": [2]},
        (2,),
        (8, 80),
        [(STATE, 3, 0, 0)],
    ),
    ("Qwen3NextConfig", {}, every(4, 48), (2, 256), [(STATE, 36, 0, 0)]),
    ("Gemma3nTextConfig", {}, every(5, 20), (2, 256), [(SLIDING, 16, 512, 512)]),
    ("Gemma4TextConfig", {}, every(6, 30), (4, 512), [(SLIDING, 25, 512, 1024)]),
    (
        "Gemma4TextConfig",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 12},
        every(6, 18),
        (1, 512),
        [(SLIDING, 15, 512, 1024)],
    ),
    ("GptOssConfig", {}, every(2, 36), (8, 64), [(SLIDING, 18, 128, 512)]),
    ("Llama4TextConfig", {}, every(4, 48), (8, 128), [(CHUNKED, 36, 8192, 1024)]),
    (
        "Cohere2Config",
        {"num_key_value_heads": 8},
        every(4, 40),
        (8, 128),
        [(SLIDING, 30, 4097, 1024)],
    ),
    (
        "Olmo3Config",
        {"max_position_embeddings": 8192},
        every(4, 32),
        (32, 128),
        [(SLIDING, 24, 4096, 4096)],
    ),
    (
        "Exaone4Config",
        {"max_position_embeddings": 8192, "num_key_value_heads": 8},
        every(4, 32),
        (8, 128),
        [(SLIDING, 24, 4096, 1024)],
    ),
    ("Gemma2Config", {}, every(2, 26), (4, 256), [(SLIDING, 13, 4096, 1024)]),
    ("Gemma3TextConfig", {}, every(6, 26), (4, 256), [(SLIDING, 22, 4096, 1024)]),
    ("FalconH1Config", {}, tuple(range(32)), (8, 128), [(STATE, 32, 0, 0)]),
    ("MistralConfig", {"sliding_window": None}, (), (8, 128), []),
    # As long as the longest sequence: the server evicts from these layers, too.
    ("Olmo3Config", {"max_position_embeddings": 2048}, (), (32, 128), []),
]


@pytest.mark.parametrize(
    ("name", "options", "layers", "heads", "beside"),
    RELEASED,
    ids=[f"{name}-{len(options)}" for name, options, *_ in RELEASED],
)
def test_configurations_as_released(name, options, layers, heads, beside, tmp_path) -> None:
    getattr(transformers, name)(**options).save_pretrained(tmp_path)
    shape, _ = shape_of_model(str(tmp_path), "bfloat16")
    assert shape.layers == layers
    assert (shape.num_kv_heads, shape.head_size) == heads
    assert shape.num_layers == len(layers) or not layers
    assert shape.other_layers == tuple(
        OtherLayers(kind, count, sees, 4 * width) for kind, count, sees, width in beside
    )


def test_layers_with_caches_of_different_sizes_are_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, per_layer_config={1: {"num_key_value_heads": 8}}
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="caches of different sizes"):
        shape_of_model(str(tmp_path), "float32")


@pytest.mark.parametrize(("head_size", "times"), [(64, 1.88), (128, 1.93), (256, 1.96)])
def test_tokens_that_fit_beside_their_scales(head_size: int, times: float) -> None:
    """Blocks are as large as vLLM makes them, scales included."""
    from vllm_pyramid.attention.backend_triton import PyramidTritonBackend

    plain = CacheShape(1, 8, head_size, "bfloat16").block_bytes(16)
    for dtype, memory in (("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.uint8)):
        spec = FullAttentionSpec(
            block_size=16,
            num_kv_heads=8,
            head_size=head_size,
            dtype=memory,
            kv_quant_mode=get_kv_quant_mode(dtype),
        )
        page = PyramidTritonBackend.customize_spec(spec).page_size_bytes
        assert CacheShape(1, 8, head_size, dtype).block_bytes(16) == page
        assert plain / page == pytest.approx(times, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite4", "lfm2", "nemotron-h"])
def test_blocks_as_long_as_states(name: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from vllm_pyramid.attention.backend_cpu import PyramidCpuBackend

    family = FAMILIES[name]
    config_class = family.config or family.model.replace("ForCausalLM", "Config")
    options = {**_COMMON, **family.options, "architectures": [family.model]}
    getattr(transformers, config_class)(**options).save_pretrained(tmp_path)
    config = EngineArgs(
        model=str(tmp_path),
        dtype="float32",
        skip_tokenizer_init=True,
        additional_config={"kv_policy": "snapkv"},
    ).create_engine_config()
    smallest = config.cache_config.block_size
    current_platform._align_hybrid_block_size(config, PyramidCpuBackend)
    chosen = config.cache_config.block_size
    assert state_block_size(str(tmp_path), "float32") == chosen
    assert chosen == smallest if name == "lfm2" else chosen > smallest
