# SPDX-License-Identifier: Apache-2.0
"""The kernels' records out of a test's keywords."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from vllm_pyramid.kernels.records import Reduction, Softmax


def take(record: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove from `options` what names a field of the record; those fields."""
    names = {field.name for field in fields(record)}
    return {name: options.pop(name) for name in list(options) if name in names}


def take_softmax(options: dict[str, Any], scale: float) -> Softmax:
    """A softmax of the options that are its, which are removed."""
    return Softmax(**{"scale": scale, **take(Softmax, options)})


def head_sinks(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Learned sinks, `[heads]`, all different: for hundreds of keys with logits of a normal
    distribution, the last takes nearly all of its head's attention and the first little."""
    return torch.linspace(4.0, 9.0, heads).to(dtype)


def take_reduction(options: dict[str, Any]) -> Reduction:
    """The same of a reduction."""
    return Reduction(**take(Reduction, options))
