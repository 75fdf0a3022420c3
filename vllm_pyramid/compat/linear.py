# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the CPU platform multiply with packed weights.

Target: `vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm`, which every unquantised
linear layer and embedding calls once its weight is loaded, and the attribute `cpu_linear` that it
sets. Why: its own fast ways need operators of a CPU build of vLLM, without which it settles for
PyTorch's plain `linear`. Remove when vLLM packs with PyTorch's operators, or a platform can bring a
linear kernel.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from vllm_pyramid.platform.prepack import pack, packed_linear, reason_not_to_pack, release

logger = init_logger(f"vllm.{__name__}")

_NUMBER = "_vllm_pyramid_packed"  # attribute of a layer: of its packed weight


def install() -> None:
    """Put the wrapper in place. Idempotent."""
    if getattr(utils, "_vllm_pyramid", False):
        return
    stock = utils.dispatch_cpu_unquantized_gemm

    def dispatch_packed(layer: Any, remove_weight: bool) -> None:
        known: int | None = getattr(layer, _NUMBER, None)
        if reason := _reason_not_to_pack(layer):
            logger.debug_once("some linear layers are not packed: %s", reason)
            if known is not None:
                release(known)  # a graph that still multiplies with it must fail, not go on
            stock(layer, remove_weight)
            return
        # A layer's weights may be loaded again (`reload_weights`): its number stays.
        number = pack(layer.weight, known)
        if known is None:
            setattr(layer, _NUMBER, number)
            weakref.finalize(layer, release, number)
        layer.cpu_linear = lambda x, weight, bias: packed_linear(x, number, bias)
        if remove_weight:
            layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch_packed
    utils._vllm_pyramid = True


def is_packed(layer: Any) -> bool:
    """Whether a layer multiplies with a packed weight."""
    return hasattr(layer, _NUMBER)


def _reason_not_to_pack(layer: Any) -> str:
    """Why a layer stays as vLLM made it.

    vLLM says by `remove_weight` whether the plain weight is needed further: linear layers give it
    up; the output layer keeps it, because it may be the input embedding's too ("tied") or a draft
    model's, so its packed copy is memory on top.
    """
    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        return "input embeddings are looked up, not multiplied with"
    return reason_not_to_pack(layer.weight)
