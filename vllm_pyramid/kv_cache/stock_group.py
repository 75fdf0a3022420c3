# SPDX-License-Identifier: Apache-2.0
"""The layers of one spec that no policy evicts from: blocks, tables and bundles.

a window of 3 blocks    [null][null][b7][b2][b9]       after the next block: the head goes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool

Numbers: TypeAlias = npt.NDArray[np.int64]
# `RequestTerms.suffix`: what the KV of the first tokens depends on, apart from these tokens.
Suffix: TypeAlias = Callable[[int], bytes | None]

_NO_BOUND = 1 << 40


class Computed(NamedTuple):
    """What the step being scheduled will have computed of a request: its first `tokens` tokens."""

    hashes: Sequence[BlockHash]
    suffix: Suffix
    tokens: int


@dataclass(slots=True)
class StockTable:
    """A request's table in all layers of a group; its first `nulls` entries are null.

    `bundles` are those that others can find, from the first entry that is not null.
    """

    entries: int = 0
    nulls: int = 0
    bundles: list[BlockBundle] = field(default_factory=list)


class StockGroup:
    """Layers of one spec, which need and drop the same blocks at the same time.

    Attributes:
        index: the number of this object among its kind, which is part of its bundles' names.
        managers, groups: vLLM's managers, one per layer, and their places among all groups.
        sees: the most earlier tokens that a layer attends to.
        max_blocks: the most blocks that vLLM reserves for a request.
        held_blocks: blocks of the pool that all requests hold in these layers.
    """

    def __init__(
        self,
        pool: BundlePool,
        index: int,
        spec: KVCacheSpec,
        members: Sequence[tuple[int, SingleTypeKVCacheManager]],
    ) -> None:
        self._pool, self._index = pool, index
        self.groups, self.managers = zip(*members, strict=True)
        self.block_size = spec.block_size
        self.sees = _NO_BOUND
        if isinstance(spec, SlidingWindowSpec):
            self.sees = spec.sliding_window - 1 + spec.extra_retained_tokens
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            self.sees = spec.attention_chunk_size
        max_blocks = self.managers[0].max_admission_blocks_per_request
        self.max_blocks = _NO_BOUND if max_blocks is None else max_blocks
        self.keeps_all = isinstance(spec, FullAttentionSpec)
        self.held_blocks = 0
        self.tables: dict[str, StockTable] = {}
        # Tokens of a bundle, and of each of a request's hashes; 0 without prefix caching.
        self._bundle_tokens = self._hash_tokens = 0

    def may_share(self, bundle_tokens: int) -> bool:
        """Return whether prefixes can be found: the layers have no state, and no larger blocks."""
        has_bound = self.keeps_all or self.sees < _NO_BOUND
        return has_bound and not bundle_tokens % self.block_size

    def share(self, bundle_tokens: int, hash_tokens: int) -> None:
        """Let prefixes be found from now on."""
        self._bundle_tokens, self._hash_tokens = bundle_tokens, hash_tokens

    def blocks_of(self, tokens: Numbers | int, in_flight: Numbers | int) -> Numbers:
        """Return the most blocks that a request holds in these layers, in any shape."""
        # What a layer sees may begin inside a block, or inside a bundle.
        most = -(-(self.sees + np.asarray(in_flight, np.int64)) // self.block_size)
        most = most + self._blocks_per_bundle
        needed = -(-np.asarray(tokens, np.int64) // self.block_size)
        blocks: Numbers = len(self.managers) * np.minimum(needed, most)
        return blocks

    # Blocks -----------------------------------------------------------------------------------

    def missing_blocks(self, request_id: str, num_tokens: int, capped: bool, hit: int) -> int:
        """Return the blocks that a request needs; see `StockGroups.missing_blocks`."""
        table = self.tables.get(request_id)
        needed = cdiv(num_tokens, self.block_size)
        if table is None and hit:
            needed -= self.first_bundle(hit) * self._blocks_per_bundle
        if capped:
            needed = min(needed, self.max_blocks)
        have = 0 if table is None else table.entries
        return max(needed - have, 0) * len(self.managers)

    def allocate(self, request_id: str, num_tokens: int) -> list[list[KVCacheBlock]]:
        """Give a request its next blocks; returns those of each layer, or an empty list."""
        if (table := self.tables.get(request_id)) is None:
            table = self.tables[request_id] = StockTable()
        count = cdiv(num_tokens, self.block_size) - table.entries
        if count <= 0:
            return []
        table.entries += count
        new_blocks = self._extend(request_id, count)
        for manager, blocks in zip(self.managers, new_blocks, strict=True):
            if manager.records_new_block_ids:
                manager.new_block_ids.extend(block.block_id for block in blocks)
        return new_blocks

    def _extend(self, request_id: str, count: int) -> list[list[KVCacheBlock]]:
        """Append `count` new blocks to the table of each layer."""
        blocks = self._pool.get_new_blocks(count * len(self.managers))
        self.held_blocks += len(blocks)
        by_layer = [blocks[start : start + count] for start in range(0, len(blocks), count or 1)]
        by_layer = by_layer or [[] for _ in self.managers]
        for manager, own in zip(self.managers, by_layer, strict=True):
            manager.req_to_blocks[request_id].extend(own)
        return by_layer

    def drop_unseen(self, request_id: str, processed: int) -> None:
        """Give back the blocks that no later token of a request attends to."""
        if (table := self.tables.get(request_id)) is None:
            return
        skipped = self.managers[0].get_num_skipped_tokens(processed)
        end = min(skipped // self.block_size, table.entries)
        end -= end % self._blocks_per_bundle
        if end > table.nulls:
            self._drop(request_id, table, end)

    def _drop(self, request_id: str, table: StockTable, end: int) -> None:
        """Take blocks out of the tables up to entry `end`.

        before   [ null ][ bundle ][ bundle ][ own    ][ rest      bundles: become idle
        after    [ null ][ null   ][ null   ][ null   ][ rest      own blocks: freed
        """
        start, per_bundle = table.nulls, self._blocks_per_bundle
        layer_tables = [manager.req_to_blocks[request_id] for manager in self.managers]
        count = min(len(table.bundles), (end - start) // per_bundle)
        self._pool.release(table.bundles[:count])
        del table.bundles[:count]
        first = start + count * per_bundle
        self._pool.free_blocks(
            [block for layer_table in layer_tables for block in layer_table[first:end]]
        )
        for layer_table in layer_tables:
            layer_table[start:end] = [self._pool.null_block] * (end - start)
        self.held_blocks -= (end - start) * len(layer_tables)
        table.nulls = end

    def forget(self, request_id: str) -> None:
        """Drop a request's table before the managers free its blocks; its bundles become idle."""
        if (table := self.tables.pop(request_id, None)) is None:
            return
        if self._bundle_tokens:
            self._drop(request_id, table, table.entries)
        else:
            self.held_blocks -= (table.entries - table.nulls) * len(self.managers)

    # Bundles ----------------------------------------------------------------------------------

    @property
    def _blocks_per_bundle(self) -> int:
        """Return the blocks of a bundle in one layer."""
        return max(self._bundle_tokens // self.block_size, 1)

    def first_bundle(self, tokens: int) -> int:
        """Return the first bundle that a token behind `tokens` others attends to."""
        return self.managers[0].get_num_skipped_tokens(tokens) // self._bundle_tokens

    def publish(self, request_id: str, computed: Computed) -> None:
        """Let others find all computed bundles of a request."""
        table, per_bundle = self.tables[request_id], self._blocks_per_bundle
        number = table.nulls // per_bundle + len(table.bundles)
        while (name := self._computed_name(computed, number)) is not None:
            first = number * per_bundle
            layer_tables = [manager.req_to_blocks[request_id] for manager in self.managers]
            blocks = [
                block
                for layer_table in layer_tables
                for block in layer_table[first : first + per_bundle]
            ]
            bundle = self._pool.publish(name, blocks)
            bundle.scheduled = True
            table.bundles.append(bundle)
            number += 1

    def exact_bundles(self, request: Request, start: int) -> tuple[int, list[BlockBundle | None]]:
        """Return the number of the first bundle of the full cache's KV in a request's table from
        `start` on.

        With it the bundles that a lookup finds, None where it finds none.
        """
        if (table := self.tables.get(request.request_id)) is None:
            return start, []
        first = table.nulls // self._blocks_per_bundle
        start, per_hash = max(first, start), self._bundle_tokens // self._hash_tokens
        numbers = range(start, first + len(table.bundles))
        hashes = [request.block_hashes[(number + 1) * per_hash - 1] for number in numbers]
        return start, [self._pool.bundles.get(self._named(one, b"")) for one in hashes]

    def _computed_name(self, computed: Computed, number: int) -> BlockHash | None:
        """Return the name of a computed bundle; None if no other request may find it."""
        end = (number + 1) * self._bundle_tokens
        place = end // self._hash_tokens - 1
        if end > computed.tokens or place >= len(computed.hashes):
            return None
        return self._name(computed.hashes[place], computed.suffix(end))

    def lacks(self, hashes: Sequence[BlockHash], suffix: Suffix, number: int) -> bool:
        """Return whether this group's bundle of a cached range of positions is not cached."""
        name = self._name(hashes[number], suffix((number + 1) * self._bundle_tokens))
        return name is None or name not in self._pool.bundles

    def last_lacking(self, hashes: Sequence[BlockHash], suffix: Suffix, count: int) -> int | None:
        """Return the last bundle that a request beginning with `count` bundles would miss."""
        first = self.first_bundle(count * self._bundle_tokens)
        for number in range(count - 1, first - 1, -1):
            if self.lacks(hashes, suffix, number):
                return number
        return None

    def sources(self, hashes: Sequence[BlockHash], suffix: Suffix) -> list[BlockHash]:
        """Return the names of the bundles that a request copies if it begins with `hashes`."""
        names = [
            self._name(hashes[number], suffix((number + 1) * self._bundle_tokens))
            for number in range(self.first_bundle(len(hashes) * self._bundle_tokens), len(hashes))
        ]
        found = [name for name in names if name is not None]
        assert len(found) == len(names), "a bundle that no other request may find"
        return found

    def enter(
        self, request_id: str, count: int, sources: Sequence[Sequence[KVCacheBlock]]
    ) -> tuple[list[list[KVCacheBlock]], list[list[KVCacheBlock]]]:
        """Begin a request's tables with blocks of its own, in the places of `count` bundles.

        `sources` are the blocks of the last of these bundles, which are in sight. Returns per layer
        the blocks to copy, and the request's blocks that take them.
        """
        per_bundle = self._blocks_per_bundle
        entries, in_sight = count * per_bundle, len(sources) * per_bundle
        for manager in self.managers:
            layer_table = manager.req_to_blocks[request_id]
            if layer_table:
                raise RuntimeError(
                    f"request {request_id} has {len(layer_table)} blocks already, where its tables "
                    "begin; report this"
                )
            layer_table.extend([self._pool.null_block] * (entries - in_sight))
        own = self._extend(request_id, in_sight)
        copied = [
            [block for blocks in sources for block in blocks[start : start + per_bundle]]
            for start in range(0, len(self.managers) * per_bundle, per_bundle)
        ]
        self.tables[request_id] = StockTable(entries, entries - in_sight)
        return copied, own

    def _name(self, block_hash: BlockHash, suffix: bytes | None) -> BlockHash | None:
        """Return the name of this group's bundle; a bare hash names one of the evicting layers."""
        return None if suffix is None else self._named(block_hash, suffix)

    def _named(self, block_hash: BlockHash, suffix: bytes) -> BlockHash:
        return BlockHash(block_hash + b"/" + str(self._index).encode() + suffix)
