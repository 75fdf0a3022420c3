# SPDX-License-Identifier: Apache-2.0
"""Block tables of single KV heads, and the choice of a worker's layout of block tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.attention.per_head.context import HeadContext
from vllm_pyramid.attention.per_head.lane_tables import LaneTables
from vllm_pyramid.attention.per_head.lanes import HeadLanes
from vllm_pyramid.attention.shifted_tables import HeldTables
from vllm_pyramid.attention.table_layout import TableLayout
from vllm_pyramid.kv_cache.head_layout import HeadKVCacheSpec
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec


class HeadTableLayout(TableLayout):
    """A block table for each of `count` KV heads of each layer; a block has `block_size` tokens."""

    def __init__(self, count: int, block_size: int) -> None:
        super().__init__(count)
        self._block_size = block_size

    def context_factory(self) -> Callable[..., LayerContext]:
        lanes = HeadLanes(self.tables_per_layer, self._block_size)
        return partial(HeadContext, tables_per_layer=lanes.count, lanes=lanes)

    def device_tables(
        self,
        layers: slice,
        max_num_reqs: int,
        max_num_tokens: int,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
        held: HeldTables | None = None,
    ) -> LaneTables:
        ((width, block_size),) = set(shapes)
        return LaneTables(
            *(layers, self.tables_per_layer, max_num_reqs, max_num_tokens),
            *(width, block_size, device, held),
        )

    def device_bytes(self, num_layers: int, max_num_reqs: int, max_num_tokens: int) -> int:
        lanes = self.tables_per_layer
        return 4 * (max_num_reqs * lanes + 1) + 8 * lanes * max_num_tokens * (num_layers + 1)

    def check(self, name: str, impl: Any) -> None:
        """Raise ValueError unless a layer's attention serves tables of heads, without sinks."""
        if not getattr(impl, "serves_single_heads", False):
            raise ValueError(
                f"layer {name} has the attention {type(impl).__qualname__}, which has no block "
                "tables of single KV heads: choose a policy without `heads`"
            )
        if impl.sinks is not None:
            raise ValueError(
                f"layer {name} has learned sinks, with which lengths of single KV heads (heads) do "
                "not work yet: choose a policy without `heads`"
            )


def layout_of(specs: Sequence[LayerKVCacheSpec]) -> TableLayout:
    """Return the layout of block tables that the specs of the layers that evict ask for."""
    if isinstance(specs[0], HeadKVCacheSpec):
        return HeadTableLayout(specs[0].tables_per_layer, specs[0].block_size)
    return TableLayout()
