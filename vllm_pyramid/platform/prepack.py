# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers in oneDNN's own layout, on the CPU.

PyTorch's `linear` hands oneDNN the weight as it lies in the checkpoint, and oneDNN rearranges it in
every call. That costs most where there are few rows to multiply with, which is decoding: the
rearrangement reads and writes the whole weight. vLLM's CPU builds keep it rearranged (with an
operator of their own that the wheel lacks); here PyTorch's does it, which gives the same bits.

Rearranged weights are named by number in the operator `vllm_pyramid::packed_linear`: a tensor in an
opaque layout cannot be an input of a graph that torch.compile makes, a number can.
"""

from __future__ import annotations

import itertools

import torch

__all__ = ["multiply_packed", "pack", "packed_linear", "reason_not_to_pack", "release"]

_PACKED: dict[int, torch.Tensor] = {}
_NUMBERS = itertools.count()
_LIBRARIES: list[torch.library.Library] = []


def reason_not_to_pack(weight: torch.Tensor) -> str:
    """Why PyTorch's plain `linear` stays, in words; empty where the weight can be packed.

    Only bfloat16 gains: PyTorch has float32 multiplied by MKL, which packs panels as it goes, and
    float16 only where the CPU has instructions for it.
    """
    if weight.is_meta or weight.device.type != "cpu":
        return f"the weight is on the device {weight.device.type!r}"
    if weight.dim() != 2 or not weight.numel():
        return f"the weight has the shape {tuple(weight.shape)}, not [outputs, inputs]"
    if weight.dtype != torch.bfloat16:
        return f"the weight is {weight.dtype}: only bfloat16 is packed"
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "this PyTorch has no oneDNN, or it is switched off"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 kernels for this CPU"
    return ""


def pack(weight: torch.Tensor, number: int | None = None) -> int:
    """Keep a rearranged copy of `weight` `[outputs, inputs]`; returns its number.

    Args:
        number: of an earlier copy, which this one takes the place of: a compiled graph has the
            number as a constant and multiplies with whatever stands under it.

    It stays until `release`.
    """
    _define()
    if number is None:
        number = next(_NUMBERS)
    # What the layout is chosen for: the rows of a decode step. Larger inputs work with it too.
    _PACKED[number] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)
    return number


def release(number: int) -> None:
    """Give the memory of a copy back; multiplying with it is a KeyError from then on."""
    _PACKED.pop(number, None)


def packed_linear(x: torch.Tensor, number: int, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` with the weight packed as `number`.

    Args:
        x: `[..., inputs]` bfloat16. bias: `[outputs]` or None.
    """
    if torch.compiler.is_compiling():
        result: torch.Tensor = torch.ops.vllm_pyramid.packed_linear(x, number, bias)
        return result
    return multiply_packed(x, number, bias)


def multiply_packed(x: torch.Tensor, number: int, bias: torch.Tensor | None) -> torch.Tensor:
    """`packed_linear` outside of graphs, and what the operator in them calls."""
    weight = _PACKED[number]
    if not x.numel():  # oneDNN takes no empty operand
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _define() -> None:
    if _LIBRARIES:
        return
    library = torch.library.Library("vllm_pyramid", "FRAGMENT")
    library.define("packed_linear(Tensor x, int number, Tensor? bias) -> Tensor")
    # By its name in this module, under which profiles put another function for a while.
    library.impl("packed_linear", lambda x, number, bias: multiply_packed(x, number, bias), "CPU")

    @torch.library.register_fake("vllm_pyramid::packed_linear", lib=library)
    def _fake(x: torch.Tensor, number: int, bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], _PACKED[number].shape[0]))

    _LIBRARIES.append(library)
