# SPDX-License-Identifier: Apache-2.0
"""The output projection as vLLM's layers show it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vllm_pyramid.compat import output_projection
from vllm_pyramid.compat.output_projection import output_weights
from vllm_pyramid.step.output_factors import output_factors

pytestmark = pytest.mark.cpu

HEADS, SIZE, HIDDEN = 3, 4, 7
NAME = "layers.1.self_attn.attn"


class Packed(nn.Module):
    """A linear layer that has dropped its matrix and still multiplies by it."""

    params_dtype = torch.float32

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.matrix = (matrix,)
        self.input_size_per_partition = matrix.shape[1]
        self.quant_method = Products()


class Products:
    """What a packed layer does with its input, in place of vLLM's quantisation methods."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(layer, Packed) and bias is None
        return x @ layer.matrix[0].t()


class WithLora(nn.Module):
    def __init__(self, base: Packed) -> None:
        super().__init__()
        self.base_layer = base


@pytest.fixture(autouse=True)
def _packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_projection, "RowParallelLinear", Packed)


def model(**children: nn.Module) -> nn.Module:
    """Two layers, of which the second has `children` next to its attention."""
    attention = nn.Module()
    for name, child in {"attn": nn.Identity(), **children}.items():
        attention.add_module(name, child)
    layers = nn.ModuleList([nn.Module(), nn.Module()])
    layers[1].add_module("self_attn", attention)
    whole = nn.Module()
    whole.add_module("layers", layers)
    return whole


@pytest.mark.parametrize("lora", [False, True])
def test_the_columns_of_each_head(lora: bool) -> None:
    matrix = torch.randn(HIDDEN, HEADS * SIZE, generator=torch.Generator().manual_seed(1))
    linear: nn.Module = WithLora(Packed(matrix)) if lora else Packed(matrix)
    found = output_weights(model(o_proj=linear), NAME, HEADS, SIZE)
    assert found.shape == (HEADS, HIDDEN, SIZE)
    for head in range(HEADS):
        assert torch.equal(found[head], matrix[:, head * SIZE : (head + 1) * SIZE])
    x = torch.randn(HEADS, SIZE, 5, generator=torch.Generator().manual_seed(2))
    factors = output_factors(found)
    assert factors.shape == (HEADS, SIZE, SIZE)
    torch.testing.assert_close((factors @ x).norm(dim=1), (found @ x).norm(dim=1))


def test_few_outputs_give_small_factors() -> None:
    weights = torch.randn(HEADS, 2, SIZE, generator=torch.Generator().manual_seed(1))
    x = torch.randn(HEADS, SIZE, 5, generator=torch.Generator().manual_seed(2))
    factors = output_factors(weights)
    assert factors.shape == (HEADS, 2, SIZE)
    torch.testing.assert_close((factors @ x).norm(dim=1), (weights @ x).norm(dim=1))


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ({}, "has 0 of them next to its attention"),
        ({"a": HEADS * SIZE, "b": HEADS * SIZE}, "has 2 of them"),
        ({"o_proj": HEADS * SIZE + 1}, "has one of 13 inputs, and its attention has 3 heads of 4"),
    ],
)
def test_projections_that_are_not_the_attentions_are_refused(
    children: dict[str, int], message: str
) -> None:
    linears = {name: Packed(torch.zeros(HIDDEN, inputs)) for name, inputs in children.items()}
    with pytest.raises(ValueError, match=message):
        output_weights(model(**linears), NAME, HEADS, SIZE)


def test_a_gate_in_between_is_refused() -> None:
    whole = model(o_proj=Packed(torch.zeros(HIDDEN, HEADS * SIZE)))
    vars(whole.get_submodule("layers.1.self_attn"))["attn_output_gate"] = True
    with pytest.raises(ValueError, match="a gate between its attention and the projection"):
        output_weights(whole, NAME, HEADS, SIZE)
