# SPDX-License-Identifier: Apache-2.0
"""The kernels' records, made from a test's keyword arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from vllm_pyramid.kernels.records import Reduction, Softmax


def take(record: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that name a field of the record, and return them."""
    names = {field.name for field in fields(record)}
    return {name: options.pop(name) for name in list(options) if name in names}


def take_softmax(options: dict[str, Any], scale: float) -> Softmax:
    """Make a softmax of the options that name its fields, and remove them."""
    return Softmax(**{"scale": scale, **take(Softmax, options)})


def head_sinks(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return different sinks, `[heads]`.

    Over hundreds of keys with normally distributed logits the first sink takes little of its head's
    attention, and the last nearly all.
    """
    return torch.linspace(4.0, 9.0, heads).to(dtype)


def take_reduction(options: dict[str, Any]) -> Reduction:
    """Make a reduction of the options that name its fields, and remove them."""
    return Reduction(**take(Reduction, options))
