# SPDX-License-Identifier: Apache-2.0
"""The stack of free blocks does what vLLM's queue does; new blocks look like vLLM's."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_pyramid.kv_cache.free_blocks import FreeBlockStack
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.kv_cache.new_blocks import NewBlocks, NoBlocks, extend_tables, kv_cache_blocks
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("seed", range(5))
def test_blocks_come_in_the_order_of_vllms_queue(seed: int) -> None:
    """Whatever is taken and put back, at the front, at the end, one by one or many at once."""
    rng = np.random.default_rng(seed)
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(50)])
    stack = FreeBlockStack([KVCacheBlock(i) for i in range(50)])
    of_queue: list[KVCacheBlock] = []
    of_stack: list[KVCacheBlock] = []
    for _ in range(300):
        what, count = rng.integers(5), int(rng.integers(8))
        if what == 0 and stack.num_free_blocks:
            of_queue.append(queue.popleft())
            of_stack.append(stack.popleft())
        elif what == 1 and count <= stack.num_free_blocks:
            of_queue += queue.popleft_n(count)
            of_stack += stack.popleft_n(count)
        elif what == 2:
            queue.prepend_n([of_queue.pop() for _ in range(min(count, len(of_queue)))])
            stack.prepend_n([of_stack.pop() for _ in range(min(count, len(of_stack)))])
        elif what == 3:
            queue.append_n([of_queue.pop(0) for _ in range(min(count, len(of_queue)))])
            stack.append_n([of_stack.pop(0) for _ in range(min(count, len(of_stack)))])
        elif of_stack:
            queue.append(of_queue.pop())
            stack.append(of_stack.pop())
        assert ids(of_queue) == ids(of_stack)
        assert stack.num_free_blocks == queue.num_free_blocks
        assert ids(stack.get_all_free_blocks()) == ids(queue.get_all_free_blocks())


def test_what_only_vllms_prefix_cache_does_is_refused() -> None:
    stack = FreeBlockStack([KVCacheBlock(0), KVCacheBlock(1)])
    with pytest.raises(RuntimeError, match="not at the front"):
        stack.remove(stack.get_all_free_blocks()[1])
    stack.popleft_n(2)
    with pytest.raises(ValueError, match="No free blocks"):
        stack.popleft()
    with pytest.raises(AssertionError):
        stack.popleft_n(1)


def test_one_block_in_each_layer_looks_like_vllms_lists() -> None:
    column = [KVCacheBlock(i) for i in (7, 3, 5)]
    lists = tuple([block] for block in column)
    none = NoBlocks(((), (), ()))
    tables: list[list[KVCacheBlock]] = [[], [], []]
    stock = KVCacheBlocks(lists)
    ours = kv_cache_blocks(extend_tables(tables, column, [1, 2, 3], units=1), none)
    assert tables == list(lists)
    assert type(ours) is NewBlocks
    assert ours.get_block_ids() == stock.get_block_ids() == ([7], [3], [5])
    assert ours.get_block_ids(allow_none=True) == stock.get_block_ids(allow_none=True)
    assert ours.get_block_ids(group_ids=[2, 0]) == stock.get_block_ids(group_ids=[2, 0])
    assert list(ours.blocks) == list(lists)
    assert list(ours.blocks[1:]) == list(lists[1:])
    assert (ours + stock).blocks == (stock + stock).blocks
    mixed = extend_tables(tables, column, [2, 2, 3], units=2)
    assert mixed == ([column[0], column[1]], [], [column[2]])
    assert tables[0] == [column[0], column[0], column[1]] and tables[1] == [column[1]]
    assert kv_cache_blocks(mixed, none).get_block_ids() == ([7, 3], [], [5])
    assert none.get_block_ids() == ([], [], []) and none.get_block_ids(allow_none=True) is None
    assert kv_cache_blocks((), none) is none
    assert kv_cache_blocks(([], []), none) is none


@pytest.mark.parametrize("sizes", [(16, 16, 16), (16, 32, 32), (16, 32, 48)])
def test_growth_is_the_difference_of_entries(sizes: tuple[int, ...]) -> None:
    """For tables of any length: what is remembered of one holds for another."""
    layers = LayerBlocks(sizes, PipelineLayout((len(sizes),)), 16)
    for have in range(20):
        for need in range(have + 1, 26):
            missing, ends = layers.growth(have, need)
            wanted = layers.of_units(need) - layers.of_units(have)
            assert missing.tolist() == wanted.tolist()
            assert ends == np.cumsum(wanted).tolist()
