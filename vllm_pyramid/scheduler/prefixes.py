# SPDX-License-Identifier: Apache-2.0
"""Prefixes in the tables of requests: which rows a request may share, and the moves between both.

A request shares blocks only before the first position that an eviction of its own writes to
(`RetentionPlan.untouched`). So nothing that is shared is ever written, and what is shared is the KV
of the full cache: requests find each other's blocks whatever their policies and budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_pyramid.scheduler.rows import Row, RowPool


class Prefixes:
    """Rows of the pool, and the layers' tables in which their blocks stand.

    Args:
        managers: of the layers. block_sizes: `[layers]`, tokens of a block in each.
        hash_block_size: tokens of one of a request's `block_hashes`.

    Attributes:
        tokens: of a row: the largest block.
        blocks: `[layers]` int64, blocks of a row in each layer.
    """

    def __init__(
        self,
        pool: RowPool,
        managers: Sequence[SingleTypeKVCacheManager],
        block_sizes: npt.NDArray[np.int64],
        hash_block_size: int,
    ) -> None:
        self._pool, self._managers = pool, managers
        self.tokens = int(block_sizes.max())
        self.blocks = self.tokens // block_sizes
        self._counts: list[int] = self.blocks.tolist()
        assert self.tokens % hash_block_size == 0, (self.tokens, hash_block_size)
        self._hashes_per_row = self.tokens // hash_block_size

    def find(self, request: Request, tokens: int) -> list[BlockHash]:
        """The hashes of rows that a request without blocks could begin with.

        Args:
            tokens: of all these rows, at most.
        """
        hashes = self._hashes(request)[: tokens // self.tokens]
        return hashes[: self._pool.longest(hashes)]

    def enter(self, request_id: str, hashes: Sequence[BlockHash]) -> tuple[list[Row], int]:
        """Put the rows of these hashes at the head of a request's empty tables.

        Returns:
            The rows, and how many of them were idle.
        """
        rows, revived = self._pool.adopt(hashes)
        columns = iter(list(zip(*(row.blocks for row in rows), strict=True)))
        for manager, count in zip(self._managers, self._counts, strict=True):
            of_layer = [next(columns) for _ in range(count)]
            table = manager.req_to_blocks[request_id]
            assert not table, f"{request_id} has blocks already"
            table.extend(chain.from_iterable(zip(*of_layer, strict=True)))
        return rows, revived

    def publish(self, request: Request, known: int, tokens: int) -> list[Row]:
        """Make rows of a request's blocks up to so many tokens, of which `known` rows are some."""
        hashes = self._hashes(request)
        end = min(tokens // self.tokens, len(hashes))
        columns: list[Sequence[KVCacheBlock]] = []
        for manager, count in zip(self._managers, self._counts, strict=True):
            blocks = manager.req_to_blocks[request.request_id][known * count : end * count]
            columns.extend(blocks[index::count] for index in range(count))
        of_rows = zip(*columns, strict=True)
        return [
            self._pool.publish(block_hash, blocks)
            for block_hash, blocks in zip(hashes[known:end], of_rows, strict=True)
        ]

    def leave(self, request_id: str, rows: Sequence[Row]) -> int:
        """Take rows out of a request's tables, where null blocks keep their places.

        Returns:
            How many of them nobody uses any more.
        """
        null = self._pool.null_block
        for manager, count in zip(self._managers, self._counts, strict=True):
            length = len(rows) * count
            manager.req_to_blocks[request_id][:length] = [null] * length
        return self._pool.release(rows)

    def withdraw(self, rows: Sequence[Row]) -> None:
        """Undo `publish` of rows whose tokens will not be computed after all."""
        for row in reversed(rows):
            self._pool.withdraw(row)

    def _hashes(self, request: Request) -> list[BlockHash]:
        return request.block_hashes[self._hashes_per_row - 1 :: self._hashes_per_row]
