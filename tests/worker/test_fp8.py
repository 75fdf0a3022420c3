# SPDX-License-Identifier: Apache-2.0
"""Caches of 8-bit floats in the attention of the CPU: whose scales count, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_pyramid.attention import backend_cpu
from vllm_pyramid.compat.backend_names import CPU_BACKEND
from vllm_pyramid.compat.platform.cpu_platform import PyramidCpuPlatform


def layer(key_scale: float, value_scale: float) -> Any:
    return SimpleNamespace(_k_scale_float=key_scale, _v_scale_float=value_scale)


def attention(dtype: str, **options: Any) -> Any:
    return backend_cpu.PyramidCpuImpl(4, 32, 1.0, 2, kv_cache_dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "auto", "bfloat16"])
def test_scales_are_those_of_the_layer_that_writes(monkeypatch, dtype) -> None:
    layers = {"below": layer(0.5, 2.0)}
    context = SimpleNamespace(no_compile_layers=layers)
    monkeypatch.setattr(backend_cpu, "get_forward_context", lambda: context)
    own, plain = layer(3.0, 4.0), (1.0, 1.0)
    quantised = dtype.startswith("fp8")
    reader = attention(dtype, kv_sharing_target_layer_name="below")
    assert reader._scales(own) == ((0.5, 2.0) if quantised else plain)
    assert attention(dtype)._scales(own) == ((3.0, 4.0) if quantised else plain)


def test_memory_of_bytes_is_seen_as_what_it_holds() -> None:
    memory = torch.arange(3 * 2 * 16 * 64).to(torch.uint8).view(3, 2, 16, 64)
    keys, values = attention("fp8_e5m2")._split(memory)
    assert keys.dtype == values.dtype == torch.float8_e5m2
    assert keys.shape == values.shape == (3, 2, 16, 32)
    planes = memory.view(3, 2, 32, 32)
    assert keys.view(torch.uint8).equal(planes[:, :, :16])
    assert values.view(torch.uint8).equal(planes[:, :, 16:])


def test_scales_of_every_head_are_refused() -> None:
    asked = AttentionSelectorConfig(32, torch.bfloat16, "fp8", 16)
    chosen = AttentionBackendEnum.CUSTOM
    assert PyramidCpuPlatform.get_attn_backend_cls(chosen, asked) == CPU_BACKEND
    with pytest.raises(ValueError, match=r"scales of every head.*--kv-cache-dtype bfloat16"):
        PyramidCpuPlatform.get_attn_backend_cls(
            chosen, asked._replace(use_per_head_quant_scales=True)
        )
