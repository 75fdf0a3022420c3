# SPDX-License-Identifier: Apache-2.0
"""What vLLM resolves by itself, and layers as they really are: refused where eviction would lie."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu


def resolved_config(**changes: Any) -> Any:
    """The parts of a finished `VllmConfig` that are looked at, with nothing to refuse."""
    values: dict[str, Any] = {
        "cache_config.cache_dtype": "auto",
        "speculative_config": None,
        "kv_transfer_config": None,
        "parallel_config.use_ubatching": False,
        "attention_config.backend_per_kind": {},
        "attention_config.hisparse_config": None,
        "scheduler_config.disable_hybrid_kv_cache_manager": False,
        **changes,
    }
    config = SimpleNamespace()
    for path, value in values.items():
        *parents, name = path.split(".")
        node = config
        for parent in parents:
            node.__dict__.setdefault(parent, SimpleNamespace())
            node = getattr(node, parent)
        setattr(node, name, value)
    return config


def test_nothing_resolved_nothing_refused() -> None:
    from vllm_pyramid.engine_config import _check_resolved

    _check_resolved(resolved_config())


@pytest.mark.parametrize(
    ("path", "value", "advice"),
    [
        ("cache_config.cache_dtype", "fp8_e4m3", "--kv-cache-dtype bfloat16"),
        ("speculative_config", object(), "base model"),
        ("kv_transfer_config", object(), "--kv-transfer-config"),
        ("parallel_config.use_ubatching", True, "--ubatch-size"),
        ("attention_config.backend_per_kind", {"full": 1}, "backend_per_kind"),
        ("attention_config.hisparse_config", object(), "hisparse_config"),
        ("scheduler_config.disable_hybrid_kv_cache_manager", True, "KV events"),
    ],
)
def test_what_vllm_switched_on_is_refused(path: str, value: Any, advice: str) -> None:
    from vllm_pyramid.engine_config import _check_resolved

    with pytest.raises(ValueError, match=r"KV policy.*does not work with") as error:
        _check_resolved(resolved_config(**{path: value}))
    assert advice in str(error.value)


def specs(count: int = 3, **changes: Any) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    # Not in the order of layers, and with a number of two digits.
    names = [f"model.layers.{layer}.self_attn.attn" for layer in (10, 0, 2)[:count]]
    return {name: replace(spec, **changes) for name in names}


def per_layer(stock: dict[str, Any], name: str = "pyramidkv") -> Any:
    from vllm_pyramid.compat.runner import per_layer_specs
    from vllm_pyramid.policy import load_policy

    return per_layer_specs(stock, load_policy(name), max_model_len=4096)


def test_layers_are_numbered_from_the_bottom_and_keep_their_settings() -> None:
    stock = specs(block_stride_alignment=64)
    result = per_layer(stock)
    assert list(result) == [f"model.layers.{layer}.self_attn.attn" for layer in (0, 2, 10)]
    assert [spec.layer_idx for spec in result.values()] == [0, 1, 2]
    for name, spec in result.items():
        assert spec.block_stride_alignment == 64
        assert spec.page_size_bytes == stock[name].page_size_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 1024}, "sliding window of 1024 tokens"),
        ({"attention_chunk_size": 1024}, "sliding window of 1024 tokens"),
        ({"non_causal": True}, "not causal"),
    ],
)
def test_layers_that_eviction_would_falsify_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        per_layer(specs(**changes))


def test_a_window_longer_than_any_sequence_is_none() -> None:
    assert len(per_layer(specs(sliding_window=4096))) == 3
    assert len(per_layer(specs(sliding_window=64), "full")) == 3


def test_quantised_caches_and_unequal_pages_are_refused() -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    with pytest.raises(ValueError, match=r"quantised.*--kv-cache-dtype bfloat16"):
        per_layer(specs(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), "full")
    stock = specs()
    name = next(iter(stock))
    stock[name] = replace(stock[name], num_kv_heads=4)
    with pytest.raises(ValueError, match=r"different sizes \(\[4096, 8192\] bytes"):
        per_layer(stock)


def test_other_kinds_of_cache_are_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    stock = specs(1)
    name = next(iter(stock))
    stock[name] = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match=f"{name}.*MLAAttentionSpec"):
        per_layer(stock)
