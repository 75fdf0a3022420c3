# SPDX-License-Identifier: Apache-2.0
"""Choose the layout of a worker's block tables."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_pyramid.attention.per_head.layout import HeadTableLayout
from vllm_pyramid.attention.table_layout import TableLayout
from vllm_pyramid.kv_cache.head_layout import HeadKVCacheSpec
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec


def layout_of(specs: Sequence[LayerKVCacheSpec]) -> TableLayout:
    """Return the layout that the specs of the layers that evict ask for."""
    if isinstance(specs[0], HeadKVCacheSpec):
        return HeadTableLayout(specs[0].tables_per_layer, specs[0].block_size)
    return TableLayout()
