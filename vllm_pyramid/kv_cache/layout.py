# SPDX-License-Identifier: Apache-2.0
"""Which block tables a request has, and which of them each layer reads.

The coordinator, its stores and its counters work on *tables*, numbered from the bottom layer on. A
table has a length, a skip and blocks. `Layout` maps tables to vLLM's KV cache groups:

    one table per layer       table l is the table of layer l's group
    one table per KV head     `head_layout.py`: several tables share that of a layer's group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_pyramid.kv_cache.spec import LayerKVCacheManager, LayerKVCacheSpec

Numbers = npt.NDArray[np.int64]


class PrefixKind(NamedTuple):
    """Which tables' blocks are in a bundle of a prefix.

    Attributes:
        tables: `[tables]` bool; None: all.
        suffix: of these bundles' hashes, where others have the blocks of other tables.
        to_end: whether requests keep these bundles when they evict.
    """

    tables: npt.NDArray[np.bool_] | None = None
    suffix: bytes = b""
    to_end: bool = False


class Layout:
    """One block table for each layer that evicts; `managers` are vLLM's, of all groups.

    Attributes:
        groups: numbers of the layers' groups, from the bottom.
        recording: layer and manager of those that note the ids of new blocks, to have them zeroed.
        others: number and manager of each group that does not evict.
        owners: what tables belong to, for messages.
    """

    owners = "layers"

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        own = []
        self.others: list[tuple[int, SingleTypeKVCacheManager]] = []
        for group, manager in enumerate(managers):
            spec = manager.kv_cache_spec
            if isinstance(manager, LayerKVCacheManager) and isinstance(spec, LayerKVCacheSpec):
                own.append((spec, group, manager))
            else:
                self.others.append((group, manager))
        own.sort(key=lambda layer: layer[0].layer_idx)
        self.specs, self.groups = [spec for spec, _, _ in own], [group for _, group, _ in own]
        assert [spec.layer_idx for spec in self.specs] == list(range(len(own))), "layers missing"
        if not self.others:  # blocks of layers are then given out as those of groups
            assert self.groups == list(range(len(own))), "groups are not in the order of layers"
        self.managers = tuple(manager for _, _, manager in own)
        self.recording = [
            (layer, manager)
            for layer, manager in enumerate(self.managers)
            if manager.records_new_block_ids
        ]

    @property
    def layers(self) -> list[int]:
        """Return the model's own numbers of the layers."""
        return [spec.model_layer for spec in self.specs]

    def prefix_kinds(self) -> list[PrefixKind]:
        """Return the kinds of bundles into which prefixes go."""
        return [PrefixKind()]

    # Tables of a request --------------------------------------------------------------------------

    def vllm_tables(self, request_id: str) -> list[list[KVCacheBlock]]:
        """Return vLLM's tables of a request in the groups of the layers, `[layers]`."""
        return [manager.req_to_blocks[request_id] for manager in self.managers]

    def tables(self, request_id: str) -> list[list[KVCacheBlock]]:
        """Return the blocks in each table of a request. Not to be written to."""
        return self.vllm_tables(request_id)

    def new_blocks(
        self, by_group: Sequence[Sequence[KVCacheBlock]]
    ) -> list[Sequence[KVCacheBlock]]:
        """Return each table's new blocks, of those of all groups `[groups][blocks]`."""
        return [by_group[group] for group in self.groups]

    def bundle_entries(
        self, blocks: Numbers, chosen: npt.NDArray[np.bool_]
    ) -> list[tuple[list[int], int]]:
        """Return which entries of each of vLLM's tables are a bundle's, and how many it spans.

        `blocks`, `[tables]`, are at a bundle's positions; `chosen` says which are in the bundle.
        """
        return [
            (list(range(span)) if is_chosen else [], span)
            for span, is_chosen in zip(blocks.tolist(), chosen.tolist(), strict=True)
        ]

    def clear(self, request_id: str, table: int, first: int, end: int) -> None:
        """Put null blocks into a request's table from entry `first` up to `end`; none is freed."""
        manager = self.managers[table]
        null = [manager.block_pool.null_block] * max(end - first, 0)
        manager.req_to_blocks[request_id][first : max(end, first)] = null

    def blocks_held(self, request_id: str) -> list[int]:
        """Count the blocks of the pool in each table of a request."""
        if request_id not in self.managers[0].req_to_blocks:  # to ask for it would add it
            return [0] * sum(spec.tables_per_layer for spec in self.specs)
        return [sum(not block.is_null for block in table) for table in self.tables(request_id)]

    def move_front(self, request_id: str, before: Numbers, heads: Numbers, count: int) -> None:
        """Move the first `count` blocks behind each table's head to the end of a longer head.

            before   [ null ][ front ][ head          ][ others
            after    [ null ][ head          ][ front ][ others

        `before` and `heads`, `[tables]`, are entries of the head before and now.
        """
        for manager, old, new in zip(self.managers, before.tolist(), heads.tolist(), strict=True):
            table = manager.req_to_blocks[request_id]
            front, end = table[old : old + count], new + count
            table[old:end] = [*table[old + count : end], *front]

    def release_heads(self, request_id: str, heads: Numbers) -> Numbers:
        """Free the first `heads` blocks of each table; return how many were held, `[tables]`."""
        released = [
            manager.release_head(request_id, head)
            for manager, head in zip(self.managers, heads.tolist(), strict=True)
        ]
        return np.array(released, np.int64)

    # Reports --------------------------------------------------------------------------------------

    def sums(self, numbers: Numbers) -> list[int]:
        """Return the sum of each layer's tables, `[layers]`, of `[tables]` numbers."""
        found: list[int] = numbers.tolist()
        return found

    def means(self, numbers: Numbers) -> list[int]:
        """Return the mean of each layer's tables, rounded down; see `sums`."""
        return self.sums(numbers)

    def report(self) -> dict[str, int]:
        """Return what a request's report says of the layout."""
        return {}
