# SPDX-License-Identifier: Apache-2.0
"""The weights' type on processors without bfloat16 products."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lab.cost.model import step_parameters
from vllm_pyramid.tools.bench.shapes import SHAPES, write_model

SMALL = SHAPES["small"]
GIB = 2**30


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, on a processor with AVX2 alone and 16 GiB free on each of two nodes."""
    from vllm_pyramid.compat.platform import defaults
    from vllm_pyramid.frontend import weights

    defaults.withdraw()  # what other tests' engines left, which `monkeypatch` would put back
    monkeypatch.setattr(weights, "has_bfloat16_products", lambda: False)
    monkeypatch.setattr(weights, "available_host_memory", lambda: 32 * GIB)
    monkeypatch.setattr(weights, "free_by_node", lambda: [16 * GIB] * 2)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for name in (weights.DECIDED, "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    return weights


@pytest.fixture
def chosen(weights: Any, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """`chosen(**arguments)`: types of weights and cache of an engine's whole configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.plugin import register

    register()
    stored = replace(SMALL, dtype="bfloat16")
    write_model(stored, tmp_path)

    def types(**own: Any) -> tuple[str, str]:
        folder = own.pop("model", tmp_path)
        policy = own.pop("policy", "snapkv")
        args = EngineArgs(
            str(folder), additional_config={"kv_policy": policy}, enforce_eager=True, **own
        )
        before = args.dtype, args.kv_cache_dtype
        config = args.create_engine_config()
        assert (args.dtype, args.kv_cache_dtype) == before
        cache = config.cache_config.cache_dtype
        return str(config.model_config.dtype).removeprefix("torch."), cache

    return types


def test_float32_with_a_cache_of_16_bits(chosen: Callable[..., tuple[str, str]]) -> None:
    assert chosen() == ("float32", "bfloat16")
    assert chosen(kv_cache_dtype="fp8") == ("float32", "fp8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.bfloat16])
def test_the_users_type_stays(chosen: Callable[..., tuple[str, str]], dtype: Any) -> None:
    assert chosen(dtype=dtype) == (str(dtype).removeprefix("torch."), "auto")


def test_a_processor_that_multiplies_bfloat16_does(chosen, weights, monkeypatch) -> None:
    monkeypatch.setattr(weights, "has_bfloat16_products", lambda: True)
    assert chosen() == ("bfloat16", "auto")


def test_an_engine_without_a_policy_is_vllms(chosen, weights) -> None:
    assert chosen() == ("float32", "bfloat16")
    assert weights.DECIDED in os.environ
    assert chosen(policy="none") == ("bfloat16", "auto")
    assert weights.DECIDED not in os.environ


@pytest.mark.parametrize(
    ("gib", "own", "fits"),
    [
        (3.9, {}, True),  # twice as much as float32; half of the 16 GiB of one node
        (4.1, {}, False),
        (4.1, {"tensor_parallel_size": 2}, True),  # on both nodes
        (4.1, {"data_parallel_size": 2}, False),
        (3.9, {"kv_cache_memory_bytes": 2 * GIB}, False),
        (0.9, {"gpu_memory_utilization": 0.001}, False),
    ],
)
def test_only_where_memory_allows(chosen, tmp_path, gib, own, fits) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(gib * GIB))  # takes no room
    assert chosen(**own)[0] == ("float32" if fits else "bfloat16")


def test_a_process_that_starts_later_decides_the_same(chosen, weights, monkeypatch) -> None:
    """An API server of several: the engine has taken its memory by then."""
    from vllm_pyramid.compat.platform import defaults

    assert chosen()[0] == "float32"
    monkeypatch.setattr(defaults, "_chosen", {})  # of another process, one of vLLM's own
    monkeypatch.setattr(defaults.multiprocessing, "parent_process", lambda: object())
    monkeypatch.setattr(weights, "available_host_memory", lambda: 0)
    assert chosen()[0] == "float32"
    monkeypatch.setenv(weights.DECIDED, "float32 of-another-model")
    assert chosen()[0] == "bfloat16"


def test_sizes_by_files_and_by_the_configuration(weights: Any, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    write_model(SMALL, tmp_path)
    config = EngineArgs(str(tmp_path)).create_model_config()
    own = step_parameters(SMALL) + SMALL.hidden * SMALL.vocabulary
    assert weights.float32_bytes(config) == 4 * own
    for name in ("a.bin", "a.safetensors", "b.safetensors", "consolidated.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(GIB)
    assert weights.float32_bytes(config) == 4 * GIB
    config.hf_text_config.dtype = "float32"
    assert weights.float32_bytes(config) == 2 * GIB


@pytest.mark.parametrize(
    ("found", "ceiling", "has"),
    [
        ({"avx2": True}, "", False),
        ({"avx2": True, "avx512_f": True}, "", False),
        ({"avx512_bf16": True}, "", True),
        ({"amx_bf16": True}, "", True),
        ({"avx512_bf16": True}, "AVX512_CORE_BF16", True),
        ({"avx512_bf16": True}, "AVX10_1_512_AMX", True),
        ({"avx512_bf16": True, "amx_bf16": True}, "AVX2", False),
        ({"avx512_bf16": True}, "AVX512_CORE", False),
        ({"architecture": "aarch64"}, "", True),  # not looked into
    ],
)
def test_products_of_bfloat16(monkeypatch, found, ceiling, has) -> None:
    from vllm_pyramid.frontend import weights

    found = {"architecture": "x86_64", **found}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(found))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", ceiling)
    assert weights.has_bfloat16_products() == has
