# SPDX-License-Identifier: Apache-2.0
"""The output projection behind a layer's attention, whatever form its weights have.

Target: the `RowParallelLinear` next to an attention layer, its `quant_method.apply`,
`params_dtype`, `input_size_per_partition`; `base_layer` of a layer with LoRA. Why: on the CPU vLLM
packs the weights and drops the tensor, and quantised layers never have one, so the matrix is read
off by what the layer does with unit vectors. Remove when vLLM gives the weights of a linear layer
in one form.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear


@torch.inference_mode()
def output_weights(model: torch.nn.Module, name: str, heads: int, size: int) -> torch.Tensor:
    """Return the columns of the output projection that each query head feeds: `[H, C, D]` float32.

    They are this rank's, without the bias and without what LoRA adds for some requests.

    Args:
        name: of the attention layer. heads: H, query heads of this rank. size: D.

    Raises:
        ValueError: no such projection stands next to the attention, or something stands between.
    """
    try:
        parent = model.get_submodule(name.rpartition(".")[0])
    except AttributeError as error:
        raise ValueError(f"layer {name} is not found under its name: {error}") from error
    linears = [getattr(child, "base_layer", child) for child in parent.children()]
    found = [linear for linear in linears if isinstance(linear, RowParallelLinear)]
    if len(found) != 1:
        raise ValueError(f"layer {name} has {len(found)} of them next to its attention, not one")
    if getattr(parent, "attn_output_gate", False):
        raise ValueError(f"layer {name} has a gate between its attention and the projection")
    (linear,) = found
    if linear.input_size_per_partition != heads * size:
        raise ValueError(
            f"layer {name} has one of {linear.input_size_per_partition} inputs, and its attention "
            f"has {heads} heads of {size}"
        )
    return torch.stack([_columns(linear, head * size, size) for head in range(heads)])


def _columns(linear: Any, first: int, count: int) -> torch.Tensor:
    """Return `count` columns of a linear layer's matrix, `[C, count]` float32."""
    device = next(linear.parameters()).device
    units = torch.zeros(
        count, linear.input_size_per_partition, dtype=linear.params_dtype, device=device
    )
    units[:, first : first + count].fill_diagonal_(1)
    found: torch.Tensor = linear.quant_method.apply(linear, units, None)
    return found.float().t()
