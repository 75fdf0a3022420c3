# SPDX-License-Identifier: Apache-2.0
"""Packed linear layers: the values of plain ones, where they are used, and where not."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from vllm_pyramid.platform import prepack
from vllm_pyramid.platform.prepack import pack, packed_linear, reason_not_to_pack

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here"
)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.cpu
@needs_bf16
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 512), (513, 130), (7, 33), (1, 1)])
@pytest.mark.parametrize("rows", [1, 8, 129, 0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values(outputs: int, inputs: int, rows: int, has_bias: bool) -> None:
    """The bits of PyTorch's plain product, which rounds once to bfloat16."""
    weight, x = _random(outputs, inputs), _random(rows, inputs)
    bias = _random(outputs) if has_bias else None
    result = packed_linear(x, pack(weight), bias)
    assert result.shape == (rows, outputs) and result.dtype == torch.bfloat16
    assert torch.equal(result, linear(x, weight, bias))
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a unit in the last of 8 bits, and what adding up in float32 loses.
    bound = exact.abs() * 2.0**-8 + 1e-5 * inputs
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.cpu
@needs_bf16
def test_inputs_as_vllm_passes_them() -> None:
    """Views into a wider tensor, three dimensions, and under torch.compile."""
    weight = _random(96, 64)
    number = pack(weight)
    wide = _random(20, 192)
    part = wide[:, 64:128]
    expected = linear(part, weight)
    assert torch.equal(packed_linear(part, number, None), expected)
    stacked = part.reshape(4, 5, 64)
    assert torch.equal(packed_linear(stacked, number, None), expected.reshape(4, 5, 96))

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return packed_linear(x * 1, number, None)

    for rows in (20, 3):
        assert torch.equal(compiled(part[:rows]), linear(part[:rows], weight))


@pytest.mark.cpu
@needs_bf16
def test_weights_that_are_loaded_again_take_the_old_ones_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a graph that was compiled before; a layer that is gone leaves nothing behind."""
    from vllm.model_executor.layers import utils

    from vllm_pyramid.compat import linear as module

    # Both are put back in the end; whether another test has installed it already does not matter.
    monkeypatch.setattr(utils, "_vllm_pyramid", False, raising=False)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    module.install()
    held = len(prepack._PACKED)
    layer: Any = torch.nn.Linear(64, 96, bias=False)
    x = _random(3, 64)

    def load(layer: Any, weight: torch.Tensor) -> None:
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

    first, second = _random(96, 64), _random(96, 64) * 2
    load(layer, first)
    multiply = layer.cpu_linear

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return multiply(x * 1, None, None)

    assert torch.equal(compiled(x), linear(x, first))
    load(layer, second)
    assert len(prepack._PACKED) == held + 1
    assert torch.equal(compiled(x), linear(x, second))
    assert torch.equal(layer.cpu_linear(x, None, None), linear(x, second))
    del layer
    gc.collect()
    assert len(prepack._PACKED) == held
    with pytest.raises(KeyError):
        compiled(x)


@pytest.mark.cpu
@needs_bf16
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.empty(8, 8, dtype=torch.float32), "float32: only bfloat16"),
        (torch.empty(8, 8, dtype=torch.float16), "float16: only bfloat16"),
        (torch.empty(2, 8, 8, dtype=torch.bfloat16), "the shape (2, 8, 8)"),
        (torch.empty(0, dtype=torch.bfloat16), "the shape (0,)"),
        (torch.empty(8, 8, dtype=torch.bfloat16, device="meta"), "device 'meta'"),
        (torch.empty(8, 8, dtype=torch.bfloat16), ""),
    ],
)
def test_what_is_not_packed_and_why(weight: torch.Tensor, said: str) -> None:
    reason = reason_not_to_pack(weight)
    assert said in reason and bool(reason) == bool(said)


@pytest.mark.cpu
def test_switched_off_onednn_is_followed() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert "oneDNN" in reason_not_to_pack(torch.empty(8, 8, dtype=torch.bfloat16))


def _layers(engine: Any) -> dict[str, Any]:
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    return {name: layer for name, layer in runner.model.named_modules() if hasattr(layer, "weight")}


@pytest.mark.engine
@needs_bf16
def test_the_engine_multiplies_with_packed_weights(random_model: Path) -> None:
    """Every linear layer is packed, gave its weight up, and multiplies with the checkpoint's."""
    from safetensors.torch import load_file

    from tests.engine.support import EnginePool, greedy, random_prompts

    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "kv_policy": "full"}
    checkpoint = load_file(random_model / "model.safetensors")
    pool = EnginePool()
    try:
        engine = pool.get(random_model, dtype="bfloat16", **settings)
        layers = _layers(engine)
        kinds = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        linears = {name: layers[name] for name in layers if name.endswith(kinds)}
        assert len(linears) == 4 * engine.num_layers
        # The weights are there once: packed.
        assert all(layer.weight.numel() == 0 for layer in linears.values())
        assert layers["model.embed_tokens"].weight.numel() > 0
        for kind in ("self_attn.o_proj", "mlp.down_proj"):
            layer = linears[f"model.layers.3.{kind}"]
            weight = checkpoint[f"model.layers.3.{kind}.weight"].bfloat16()
            x = _random(5, weight.shape[1])
            applied = layer.quant_method.apply(layer, x, None)
            assert torch.equal(applied, linear(x, weight))
        (outcome,) = engine.generate(random_prompts([64]), greedy(4))
        assert len(outcome.token_ids) == 4

    finally:
        pool.close()
