# SPDX-License-Identifier: Apache-2.0
"""Prefixes in the block tables of requests: which bundles a request may share, and the moves.

A request shares blocks only before the first position that an eviction of its own writes to
(`RetentionPlan.untouched`). So no step ever writes to a shared block, and a shared block holds the
full cache's KV: requests find each other's blocks whatever their policies and budgets.

Behind that position a request can still begin with what others have computed: the worker copies it
into blocks of the request's own. What the request's eviction will overwrite there, the worker
copies first, to blocks that were reserved for it:

    positions   0 ....... untouched ....... skip of a layer ....... end of the prompt
    adopted     [ shared         ][ copied to own blocks                 ][ computed ]
    kept        [ its bundles    ][ the head's blocks ][ copies, reserved            ]

Reserved blocks count as free. If another request needs them meanwhile, less of the prompt is kept.

The bundles of what stays in place (`RetentionPlan.in_place`) are the request's to its end. At an
eviction they take the places right before what else survives:

    positions   0 ... in place ......... skip .................. end of the prompt
    before      [ bundles     ][ own                           ]
    after       [ null                  ][ bundles     ][ own  ]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.layout import Layout, PrefixKind
from vllm_pyramid.kv_cache.shared_blocks import SharedBlockIndex


class PrefixCache:
    """Bundles of the pool, and the layers' tables that contain their blocks.

    Attributes:
        to_end: whether requests keep these bundles when they evict.
        tokens: tokens of a bundle: the largest block.
        blocks: `[tables]` int64, blocks of a bundle in each table.
        bundle_blocks: `[stages]` blocks of a bundle in all tables of each stage.
        holders: which requests have which bundles.
    """

    def __init__(
        self,
        pool: BundlePool,
        layout: Layout,
        layer_blocks: LayerBlocks,
        hash_block_size: int,
        kind: PrefixKind,
    ) -> None:
        self._pool, self._layout, self._managers = pool, layout, layout.managers
        has, self._suffix, self.to_end = kind
        self.tokens = layer_blocks.largest
        of_tables = self.tokens // layer_blocks.block_sizes
        self.blocks = of_tables if has is None else np.where(has, of_tables, 0)
        self.bundle_blocks = layer_blocks.stages.sums(self.blocks)
        counts = tuple(self.bundle_blocks.tolist())
        assert has is not None or pool.bundle_counts in ((), counts), "several page sizes"
        self._counts = counts if pool.bundle_counts else ()
        self._entries = layout.bundle_entries(of_tables, self.blocks > 0)
        assert self.tokens % hash_block_size == 0, (self.tokens, hash_block_size)
        self._hashes_per_bundle = self.tokens // hash_block_size
        self.holders = SharedBlockIndex()

    def find(self, request: Request, tokens: int, shared: int) -> list[BlockHash]:
        """Return the hashes of the bundles that a request without blocks could begin with.

        They have at most `tokens` tokens; the request may share the first `shared` of them.
        """
        hashes = self.hashes(request)[: tokens // self.tokens]
        hit = hashes[: self._pool.longest_prefix(hashes)]
        while len(hit) > shared and not self._pool.bundles[hit[-1]].scheduled:
            hit.pop()  # it would be copied before the step that computes it
        return hit

    def enter(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        to_end: int = 0,
        heads: Sequence[int] = (),
    ) -> tuple[list[BlockBundle], int]:
        """Begin a request's empty tables with bundles; return these, and how many were idle.

        The request has `to_end` of them to its end. `heads` are `[tables]` null blocks before them.
        """
        bundles, revived = self._pool.adopt(hashes)
        self.holders.add(request_id, bundles, to_end)
        columns = iter(list(zip(*(bundle.blocks for bundle in bundles), strict=True)))
        for manager, (entries, stride), head in self._tables(heads):
            table, length = manager.req_to_blocks[request_id], head + len(hashes) * stride
            if not table:
                table.extend([manager.block_pool.null_block] * length)
            places = [head + entry for entry in entries if hashes]
            if len(table) != length or not all(table[place].is_null for place in places):
                raise RuntimeError(
                    f"request {request_id} has {len(table)} blocks already, where its tables "
                    "begin; report this"
                )
            for place in places:
                table[place::stride] = next(columns)
        return bundles, revived

    def load(self, request_id: str, names: Sequence[BlockHash]) -> list[BlockBundle]:
        """Extend a request's tables by bundles that the tier below has, which last to its end.

        They are as good as some that the step being scheduled computes: it begins with the copies.
        """
        bundles = []
        self._pool.tier.pin(names)
        for name in names:
            blocks = self._pool.get_new_blocks(len(self._managers))
            for manager, block in zip(self._managers, blocks, strict=True):
                manager.req_to_blocks[request_id].append(block)
                if manager.records_new_block_ids:
                    manager.new_block_ids.append(block.block_id)
            self._pool.tier.load(name, blocks)
            bundles.append(self._pool.publish(name, blocks, self._counts))
        self.holders.add(request_id, bundles, len(bundles))
        return bundles

    def _tables(
        self, heads: Sequence[int]
    ) -> Iterable[tuple[SingleTypeKVCacheManager, tuple[list[int], int], int]]:
        """Return the manager of each of vLLM's tables, its entries of a bundle, and its head."""
        return zip(self._managers, self._entries, heads or [0] * len(self._entries), strict=True)

    def publish(
        self, request: Request, known: int, tokens: int, to_end: int = 0
    ) -> list[BlockBundle]:
        """Make bundles of a request's blocks up to `tokens`, of which `known` exist already.

        The request has `to_end` of its bundles to its end.
        """
        hashes = self.hashes(request)
        end = min(tokens // self.tokens, len(hashes))
        names = self.named(hashes[known:end])
        columns: list[Sequence[KVCacheBlock]] = []
        for manager, (entries, stride) in zip(self._managers, self._entries, strict=True):
            blocks = manager.req_to_blocks[request.request_id][known * stride : end * stride]
            columns.extend(blocks[entry::stride] for entry in entries)
        of_bundles = zip(*columns, strict=True)
        bundles = [
            self._pool.publish(block_hash, blocks, self._counts)
            for block_hash, blocks in zip(names, of_bundles, strict=True)
        ]
        self.holders.add(request.request_id, bundles, max(to_end - known, 0))
        return bundles

    def blocks_of(self, hashes: Sequence[BlockHash]) -> list[tuple[KVCacheBlock, ...]]:
        """Return the blocks of the bundles of these hashes, `[tables][bundles]`."""
        of_bundles = (self._pool.bundles[block_hash].blocks for block_hash in hashes)
        return list(zip(*of_bundles, strict=True))

    def keep_evicted(
        self,
        request_id: str,
        first: int,
        hashes: Sequence[BlockHash],
        starts_of_copies: npt.NDArray[np.int32],
        copies: Sequence[KVCacheBlock],
    ) -> npt.NDArray[np.int64]:
        """Make idle bundles of an evicted prompt: of the heads of its tables, and of copies.

            a table     [ 0 .. first ][ first .. start    ][ survivors               ]
            bundles     its own       [ the head's blocks ][ copies, [start .. end]  ]

        Args:
            first: number of the first of these bundles.
            hashes: the hashes of the bundles from `first` on.
            starts_of_copies: `[tables]`, the first position that the eviction writes to.
            copies: blocks that hold what stood from there on, table by table; there may be more.
                Unused ones go back to the pool.

        Returns:
            `[tables]` blocks of the heads, which are no longer the request's.
        """
        heads: list[int] = (starts_of_copies // self.tokens).tolist()
        end = first + len(hashes)
        columns = self._layout.tables(request_id)
        starts = np.cumsum([0, *(end - head for head in heads)]).tolist()
        unused = list(copies[starts[-1] :])
        for index in range(end - 1, first - 1, -1):
            blocks = [
                column[index] if index < head else copies[start + index - head]
                for column, head, start in zip(columns, heads, starts, strict=False)
            ]
            if not self._pool.add_idle(hashes[index - first], blocks):
                unused += blocks
        for table, head in enumerate(heads):
            self._layout.clear(request_id, table, first, head)
        self._pool.free_blocks(unused)
        return np.maximum(np.array(heads, np.int64) - first, 0)

    def leave(
        self, request_id: str, bundles: Sequence[BlockBundle], heads: Sequence[int] = ()
    ) -> int:
        """Take bundles out of a request's tables; null blocks keep their places.

            before   [ bundle ][ bundle ][ own blocks ...
            after    [ null   ][ null   ][ own blocks ...

        `heads`, `[tables]`, are entries before them; empty: none. Returns how many of the bundles
        no request uses any more.
        """
        for manager, (entries, stride), head in self._tables(heads):
            null = [manager.block_pool.null_block] * len(bundles)
            table, length = manager.req_to_blocks[request_id], len(bundles) * stride
            for entry in entries:
                table[head + entry : head + length : stride] = null
        self.holders.remove(request_id, bundles)
        return self._pool.release(bundles)

    def claim(self, request_id: str, bundles: Sequence[BlockBundle]) -> None:
        """Make bundles a request's own blocks; the tier below copies what is computed and has no
        other bundle."""
        self.withdraw(request_id, bundles)
        for bundle in bundles:
            if bundle.scheduled and bundle.hash not in self._pool.bundles:
                self._pool.tier.store(bundle)

    def withdraw(self, request_id: str, bundles: Sequence[BlockBundle]) -> None:
        """Undo `publish` for bundles whose tokens will not be computed after all."""
        self.holders.remove(request_id, bundles)
        for bundle in reversed(bundles):
            self._pool.withdraw(bundle)

    def hashes(self, request: Request) -> list[BlockHash]:
        """Return the hashes of a request's bundles."""
        return request.block_hashes[self._hashes_per_bundle - 1 :: self._hashes_per_bundle]

    def named(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return the names of the bundles of these hashes."""
        if not self._suffix:
            return hashes
        return [BlockHash(block_hash + self._suffix) for block_hash in hashes]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix that a request could begin with, of `tokens` tokens.

    `names` are of the bundles on the device, from position 0 on; the request would share the first
    `shared` of them and copy the others. `below` are in the tier below the pool, behind these.
    """

    names: list[BlockHash]
    shared: int
    below: list[BlockHash]
    tokens: int

    @property
    def shared_names(self) -> Sequence[BlockHash]:
        """Return the names of those that it would share."""
        return self.names[: self.shared]


@dataclass(slots=True)
class SharedPrefix:
    """The part of a request's tables that others may have, too.

    Attributes:
        bundles: by their kind, the bundles with which its tables begin, until an eviction gives
            them back, or to its end.
        from_below: first and last token, exclusive, that it began with out of the tier below.
    """

    bundles: dict[PrefixCache, list[BlockBundle]]
    from_below: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, kinds: Iterable[PrefixCache]) -> SharedPrefix:
        """Return the record of a request without bundles."""
        return cls({kind: [] for kind in kinds})
