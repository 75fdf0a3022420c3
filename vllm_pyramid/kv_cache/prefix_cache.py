# SPDX-License-Identifier: Apache-2.0
"""Prefixes in the tables of requests: which rows a request may share, and the moves between both.

A request shares blocks only before the first position that an eviction of its own writes to
(`RetentionPlan.untouched`). So nothing that is shared is ever written, and what is shared is the KV
of the full cache: requests find each other's blocks whatever their policies and budgets.

Behind that position a request can still begin with what others have computed, in blocks of its own
into which the worker copies it. And what an eviction of its own will overwrite there, the worker
copies first, to blocks that were set aside for it:

    positions   0 ....... untouched ....... skip of a layer ....... end of the prompt
    adopted     [ shared         ][ copied to own blocks                 ][ computed ]
    left behind [ its own rows   ][ the head's blocks ][ copies, set aside          ]

Blocks that are set aside count as free. If somebody needs them meanwhile, less is left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout
from vllm_pyramid.kv_cache.shared_blocks import SharedBlockIndex


class PrefixCache:
    """Rows of the pool, and the layers' tables in which their blocks stand.

    Args:
        managers: of the layers. block_sizes: `[layers]`, tokens of a block in each.
        hash_block_size: tokens of one of a request's `block_hashes`.
        stages: of the pipeline, each with a pool of its own.

    Attributes:
        tokens: of a row: the largest block.
        blocks: `[layers]` int64, blocks of a row in each layer. row_blocks: `[stages]` of a row in
            all layers of each.
        holders: who has which rows.
    """

    def __init__(
        self,
        pool: BundlePool,
        managers: Sequence[SingleTypeKVCacheManager],
        block_sizes: npt.NDArray[np.int64],
        hash_block_size: int,
        stages: PipelineLayout,
    ) -> None:
        self._pool, self._managers = pool, managers
        self.tokens = int(block_sizes.max())
        self.blocks = self.tokens // block_sizes
        self.row_blocks = stages.sums(self.blocks)
        assert pool.row_counts in ((), tuple(self.row_blocks.tolist())), "pages of several sizes"
        self._counts: list[int] = self.blocks.tolist()
        assert self.tokens % hash_block_size == 0, (self.tokens, hash_block_size)
        self._hashes_per_row = self.tokens // hash_block_size
        self.holders = SharedBlockIndex()

    def find(self, request: Request, tokens: int, shared: int) -> list[BlockHash]:
        """The hashes of rows that a request without blocks could begin with.

        Args:
            tokens: of all these rows, at most. shared: the first rows, which it may share.
        """
        hashes = self.hashes(request)[: tokens // self.tokens]
        found = hashes[: self._pool.longest(hashes)]
        while len(found) > shared and not self._pool.rows[found[-1]].scheduled:
            found.pop()  # copied before the step begins, which is too early
        return found

    def enter(self, request_id: str, hashes: Sequence[BlockHash]) -> tuple[list[BlockBundle], int]:
        """Put the rows of these hashes at the head of a request's empty tables.

        Returns:
            The rows, and how many of them were idle.
        """
        rows, revived = self._pool.adopt(hashes)
        self.holders.add(request_id, rows)
        columns = iter(list(zip(*(row.blocks for row in rows), strict=True)))
        for manager, count in zip(self._managers, self._counts, strict=True):
            of_layer = [next(columns) for _ in range(count)]
            table = manager.req_to_blocks[request_id]
            assert not table, f"{request_id} has blocks already"
            table.extend(chain.from_iterable(zip(*of_layer, strict=True)))
        return rows, revived

    def publish(self, request: Request, known: int, tokens: int) -> list[BlockBundle]:
        """Make rows of a request's blocks up to so many tokens, of which `known` rows are some."""
        hashes = self.hashes(request)
        end = min(tokens // self.tokens, len(hashes))
        columns: list[Sequence[KVCacheBlock]] = []
        for manager, count in zip(self._managers, self._counts, strict=True):
            blocks = manager.req_to_blocks[request.request_id][known * count : end * count]
            columns.extend(blocks[index::count] for index in range(count))
        of_rows = zip(*columns, strict=True)
        rows = [
            self._pool.publish(block_hash, blocks)
            for block_hash, blocks in zip(hashes[known:end], of_rows, strict=True)
        ]
        self.holders.add(request.request_id, rows)
        return rows

    def blocks_of(self, hashes: Sequence[BlockHash]) -> list[tuple[KVCacheBlock, ...]]:
        """The blocks of the rows of these hashes, `[layers][rows]`."""
        return list(zip(*(self._pool.rows[name].blocks for name in hashes), strict=True))

    def leave_behind(
        self,
        request_id: str,
        first: int,
        hashes: Sequence[BlockHash],
        skip: npt.NDArray[np.int32],
        copies: Sequence[KVCacheBlock],
    ) -> npt.NDArray[np.int64]:
        """Make rows of what an evicted request has left: heads of its tables, and copies.

        Args:
            first: the position of the first of these rows. hashes: of the rows from `first` on.
            skip: `[layers]` of the eviction. copies: of whole blocks from `skip` on, layer by
                layer, or more. What is not used goes back to the pool.

        Returns:
            `[layers]` blocks of the heads, which are the request's no longer.
        """
        heads: list[int] = (skip // self.tokens).tolist()
        end = first + len(hashes)
        tables = [manager.req_to_blocks[request_id] for manager in self._managers]
        starts = np.cumsum([0, *(end - head for head in heads)]).tolist()
        unused = list(copies[starts[-1] :])
        for index in range(end - 1, first - 1, -1):
            blocks = [
                table[index] if index < head else copies[start + index - head]
                for table, head, start in zip(tables, heads, starts, strict=False)
            ]
            if not self._pool.offer(hashes[index - first], blocks):
                unused += blocks
        for manager, table, head in zip(self._managers, tables, heads, strict=True):
            table[first:head] = [manager.block_pool.null_block] * max(head - first, 0)
        self._pool.free_blocks(unused)
        return np.maximum(np.array(heads, np.int64) - first, 0)

    def leave(self, request_id: str, rows: Sequence[BlockBundle]) -> int:
        """Take rows out of a request's tables, where null blocks keep their places.

        Returns:
            How many of them nobody uses any more.
        """
        for manager, count in zip(self._managers, self._counts, strict=True):
            length = len(rows) * count
            null = [manager.block_pool.null_block] * length
            manager.req_to_blocks[request_id][:length] = null
        self.holders.remove(request_id, rows)
        return self._pool.release(rows)

    def withdraw(self, request_id: str, rows: Sequence[BlockBundle]) -> None:
        """Undo `publish` of rows whose tokens will not be computed after all."""
        self.holders.remove(request_id, rows)
        for row in reversed(rows):
            self._pool.withdraw(row)

    def hashes(self, request: Request) -> list[BlockHash]:
        """Of a request's rows."""
        return request.block_hashes[self._hashes_per_row - 1 :: self._hashes_per_row]


def copies_of(
    sources: Sequence[Sequence[KVCacheBlock]], own: Sequence[Sequence[KVCacheBlock]]
) -> list[KVCacheBlockCopy]:
    """The copies that fill blocks with others, both `[layers][blocks]`.

    The worker makes a step's copies in their order and before it writes anything else, so the
    sources may go to requests that are admitted later in the step.
    """
    pairs = zip(chain.from_iterable(sources), chain.from_iterable(own), strict=True)
    return [KVCacheBlockCopy(source.block_id, block.block_id) for source, block in pairs]
