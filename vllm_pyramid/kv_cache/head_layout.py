# SPDX-License-Identifier: Apache-2.0
"""A layout in which each KV head has a block table and a length: a *lane* of its layer.

    tokens                    0 .. G N - 1            G N .. 2 G N - 1
    entries of the table      head 0 .. head G - 1    head 0 .. head G - 1

vLLM knows one table of the layer, in which head g of position p stands in entry
`(p // block_size) * G + g`. A block has the bytes of one of all heads, and G times its tokens, of
one head. The lanes are the tables of the layout: lane `layer * G + head` is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_pyramid.compat.cache_specs import return_blocks
from vllm_pyramid.kv_cache.layout import Layout, PrefixKind
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec, register_spec
from vllm_pyramid.policy.heads import Heads

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HeadKVCacheSpec(LayerKVCacheSpec):
    """A layer with a block table for each of its `lanes` KV heads, all in the table of its group.

    `whole`: which of them never evict; empty: any may.
    """

    lanes: int
    whole: tuple[bool, ...] = ()

    @classmethod
    def of(cls, spec: LayerKVCacheSpec, heads: Heads | None = None) -> Self:
        """Return a layer's spec with a table for each KV head; `heads` says which never evict."""
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
        lanes = spec.num_kv_heads
        own: dict[str, Any] = {
            "block_size": lanes * spec.block_size,
            "num_kv_heads": 1,
            "lanes": lanes,
        }
        if heads is not None:
            whole = heads.keeps_everything(spec.num_layers * lanes)
            own["whole"] = tuple(whole.reshape(-1, lanes)[spec.layer_idx].tolist())
        made = cls(**values | own)
        assert made.page_size_bytes == spec.page_size_bytes, (made, spec)
        return made

    @property
    def tables_per_layer(self) -> int:
        return self.lanes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Return the entries of a request's table, those of all heads."""
        return self.lanes * super().max_num_blocks_per_req(vllm_config, max_len)


register_spec(HeadKVCacheSpec)


class HeadLayout(Layout):
    """One block table for each KV head of each layer that evicts, in vLLM's `managers`."""

    owners = "KV heads of all layers"

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        super().__init__(managers)
        self._specs = [spec for spec in self.specs if isinstance(spec, HeadKVCacheSpec)]
        assert len(self._specs) == len(self.specs), "all layers have lanes, or none"
        self.lanes = self._specs[0].lanes

    def prefix_kinds(self) -> list[PrefixKind]:
        """Return one kind of all lanes; or that of the lanes that evict, and the others'."""
        whole = np.concatenate([spec.whole or (False,) * spec.lanes for spec in self._specs])
        if whole.all() or not whole.any():
            return [PrefixKind()]
        return [PrefixKind(~whole), PrefixKind(whole, b"whole", to_end=True)]

    def tables(self, request_id: str) -> list[list[KVCacheBlock]]:
        """Return the blocks in each lane of a request, in copies of its parts of vLLM's tables."""
        found, lanes = self.vllm_tables(request_id), self.lanes
        return [table[lane::lanes] for table in found for lane in range(lanes)]

    def new_blocks(
        self, by_group: Sequence[Sequence[KVCacheBlock]]
    ) -> list[Sequence[KVCacheBlock]]:
        """Return each lane's new blocks: those of a layer are the next of its lanes in turn."""
        lanes = self.lanes
        return [by_group[group][lane::lanes] for group in self.groups for lane in range(lanes)]

    def bundle_entries(
        self, blocks: Numbers, chosen: npt.NDArray[np.bool_]
    ) -> list[tuple[list[int], int]]:
        lanes = self.lanes
        spans = blocks.reshape(-1, lanes)[:, 0].tolist()
        return [
            (
                [
                    block * lanes + lane
                    for lane, is_chosen in enumerate(of_layer)
                    if is_chosen
                    for block in range(span)
                ],
                span * lanes,
            )
            for span, of_layer in zip(spans, chosen.reshape(-1, lanes).tolist(), strict=True)
        ]

    def clear(self, request_id: str, table: int, first: int, end: int) -> None:
        layer, lane = divmod(table, self.lanes)
        manager = self.managers[layer]
        entries = slice(first * self.lanes + lane, max(end, first) * self.lanes, self.lanes)
        null = [manager.block_pool.null_block] * max(end - first, 0)
        manager.req_to_blocks[request_id][entries] = null

    def release_heads(self, request_id: str, heads: Numbers) -> Numbers:
        """Give back the first blocks of each lane; return how many went back, `[lanes of all
        layers]`.

            before   [a0][b0][a1][b1][a2][b2]     after release_heads(rid, [2, 1])
            after    [null][null][null][b1][a2][b2]
        """
        lanes, counts = self.lanes, heads.reshape(-1, self.lanes).tolist()
        released = [
            return_blocks(manager, request_id, range(lane, lane + count * lanes, lanes))
            for manager, of_layer in zip(self.managers, counts, strict=True)
            for lane, count in enumerate(of_layer)
        ]
        return np.array(released, np.int64)

    def sums(self, numbers: Numbers) -> list[int]:
        # Every step comes here: adding up single numbers would be most of its time.
        return super().sums(numbers.reshape(-1, self.lanes).sum(axis=1))

    def means(self, numbers: Numbers) -> list[int]:
        return [total // self.lanes for total in self.sums(numbers)]

    def report(self) -> dict[str, int]:
        """Return how many numbers of a request's report belong to one layer."""
        return {"kv_heads": self.lanes} if self.lanes > 1 else {}


def make_layout(managers: Sequence[SingleTypeKVCacheManager]) -> Layout:
    """Return the layout that the specs of the layers ask for."""
    has_lanes = any(isinstance(manager.kv_cache_spec, HeadKVCacheSpec) for manager in managers)
    return HeadLayout(managers) if has_lanes else Layout(managers)
