# SPDX-License-Identifier: Apache-2.0
"""A layer's memory on CUDA, split into what our kernels read and what they move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class CacheParts:
    """A layer's memory, as our kernels see it: `keys` and `values` are `[P, G, N, D]`.

    Attributes:
        scales: fields of `AttentionBatch`. rows: of `AttentionInputs`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: dict[str, Any] = field(default_factory=dict)
    rows: tuple[torch.Tensor, torch.Tensor] | None = None


def parts_of_scaled_rows(kv_cache: torch.Tensor, dtype: torch.dtype) -> CacheParts:
    """Split `[P, G, N, 2 * (D + 4)]` bytes in vLLM's order: K, its scale, V, its scale.

    Words of 4 bytes are moved: rows begin at a multiple of these alone.
    """
    half = kv_cache.shape[-1] // 2
    numbers, words, floats = (kv_cache.view(t) for t in (dtype, torch.int32, torch.float32))
    return CacheParts(
        numbers[..., : half - 4],
        numbers[..., half:-4],
        {"key_scales": floats[..., half // 4 - 1], "value_scales": floats[..., -1]},
        (words[..., : half // 4], words[..., half // 4 :]),
    )
