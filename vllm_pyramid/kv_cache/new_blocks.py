# SPDX-License-Identifier: Apache-2.0
"""What a request gets in a step: no block, one in every layer, or more.

vLLM makes a list of new blocks and one of their ids for each group. With a group for each layer
these lists are most of a step's objects, and Python's garbage collector walks them several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class NoBlocks(KVCacheBlocks):
    """The blocks of a request that needs none in a step: nearly every request, every step.

    vLLM's own class looks into the empty list of every layer.
    """

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        """Return None where that is allowed, else an empty list per layer, as vLLM does."""
        return None if allow_none else super().get_block_ids(**kwargs)


class OneInEach(Sequence[list[KVCacheBlock]]):
    """One new block for each layer, `[layers][1]`; the lists are made when they are asked for."""

    def __init__(self, column: list[KVCacheBlock]) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> list[KVCacheBlock]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[KVCacheBlock]]: ...
    def __getitem__(self, index: int | slice) -> list[KVCacheBlock] | list[list[KVCacheBlock]]:
        if isinstance(index, slice):
            return [[block] for block in self.column[index]]
        return [self.column[index]]


def extend_tables(
    tables: Sequence[list[KVCacheBlock]],
    blocks: list[KVCacheBlock],
    ends: Sequence[int],
    *,
    units: int,
) -> tuple[list[KVCacheBlock], ...]:
    """Append new blocks to a request's tables, `[layers]`; return them, `[layers][new blocks]`.

    `blocks` are those of all layers in turn, and `ends` where each layer's end among them. Tables
    grow by `units` boundaries; a layer gets at most one block at each.
    """
    if units == 1 and len(blocks) == len(ends):  # most allocations of a decode step
        for table, block in zip(tables, blocks, strict=True):
            table.append(block)
        return cast("tuple[list[KVCacheBlock], ...]", OneInEach(blocks))
    of_layers = tuple([blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)])
    for table, new in zip(tables, of_layers, strict=True):
        table.extend(new)
    return of_layers


def begin_tables(
    pool: BlockPool,
    managers: Sequence[SingleTypeKVCacheManager],
    request_id: str,
    heads: Sequence[int],
    counts: Sequence[int],
    front: int = 0,
) -> list[Sequence[KVCacheBlock]]:
    """Begin a request's tables with heads given back already; return the `[layers]` new blocks.

    Args:
        heads: `[layers]` null blocks. counts: `[layers]` new blocks.
        front: shared blocks behind the heads; where there are any, the tables have both already.

    Raises:
        RuntimeError: the tables have other blocks.
    """
    blocks = iter(pool.get_new_blocks(sum(counts)))
    own: list[Sequence[KVCacheBlock]] = []
    for manager, head, count in zip(managers, heads, counts, strict=True):
        new = [next(blocks) for _ in range(count)]
        table = manager.req_to_blocks[request_id]
        if not front:
            table.extend([pool.null_block] * head)
        if len(table) != head + front:
            raise RuntimeError(
                f"request {request_id} has {len(table)} blocks already, where its tables begin; "
                "report this"
            )
        table.extend(new)
        if manager.records_new_block_ids:
            manager.new_block_ids.extend(block.block_id for block in new)
        own.append(new)
    return own


class NewBlocks(KVCacheBlocks):
    """The new blocks of a request."""

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        """Return the ids, `[groups][blocks]`, as vLLM does."""
        if kwargs or not isinstance(self.blocks, OneInEach):
            return super().get_block_ids(**kwargs)
        return tuple([[block.block_id] for block in self.blocks.column])


def kv_cache_blocks(blocks: tuple[list[KVCacheBlock], ...], none: NoBlocks) -> KVCacheBlocks:
    """Return new blocks, `[groups][blocks]` or an empty tuple, as vLLM's scheduler expects them."""
    return NewBlocks(blocks) if any(blocks) else none
