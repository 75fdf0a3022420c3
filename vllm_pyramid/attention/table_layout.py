# SPDX-License-Identifier: Apache-2.0
"""Which block tables the layers of a worker read: `kv_cache/layout.py` on the worker's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.attention.shifted_tables import HeldTables, ShiftedTables


class TableLayout:
    """One block table for each layer; plans have `tables_per_layer` numbers for a layer."""

    def __init__(self, tables_per_layer: int = 1) -> None:
        self.tables_per_layer = tables_per_layer

    def context_factory(self) -> Callable[..., LayerContext]:
        """Return what makes the contexts of all layers, with the arguments of `LayerContext`."""
        return LayerContext

    def device_tables(
        self,
        layers: slice,
        max_num_reqs: int,
        max_num_tokens: int,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
        held: HeldTables | None = None,
    ) -> ShiftedTables:
        """Return the tables of attention kernels that know nothing of skips.

        Args:
            layers: the numbers of this worker's layers that evict.
            max_num_reqs, max_num_tokens: of a step.
            shapes: entries of a request in vLLM's table, and tokens of a block, of each layer.
        """
        return ShiftedTables(layers, max_num_reqs, shapes, device, held)

    def device_bytes(self, num_layers: int, max_num_reqs: int, max_num_tokens: int) -> int:
        """Return the bytes of `device_tables` beside tables, lengths and skips."""
        return 0

    def check(self, name: str, impl: Any) -> None:
        """Raise ValueError unless the attention of a layer can read such tables."""
