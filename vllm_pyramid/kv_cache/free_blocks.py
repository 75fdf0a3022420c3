# SPDX-License-Identifier: Apache-2.0
"""The free blocks of a pool as a stack.

Bundles keep their blocks out of the free ones, so unlike in vLLM's linked list no block is taken
out of the middle: a slice of a list serves a step that takes a block of every layer for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class FreeBlockStack(FreeKVCacheBlockQueue):
    """Free blocks in vLLM's order; the first is taken first. vLLM reads `num_free_blocks`."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:  # vLLM's queue has linked them
            block.prev_free_block = block.next_free_block = None
        self._stack = list(reversed(blocks))
        self.num_free_blocks = len(self._stack)

    def popleft(self) -> KVCacheBlock:
        """Take the first block; ValueError if none is free."""
        if not self._stack:
            raise ValueError("No free blocks available")
        self.num_free_blocks -= 1
        return self._stack.pop()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks; the caller has seen that there are as many."""
        assert 0 <= n <= self.num_free_blocks, (n, self.num_free_blocks)
        if not n:
            return []
        taken = self._stack[: -n - 1 : -1]
        del self._stack[-n:]
        self.num_free_blocks -= n
        return taken

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the front; the first of them is taken next."""
        self._stack.extend(reversed(blocks))
        self.num_free_blocks += len(blocks)

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the end."""
        self._stack[:0] = reversed(blocks)
        self.num_free_blocks += len(blocks)

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the end."""
        self.append_n([block])

    def remove(self, block: KVCacheBlock) -> NoReturn:
        """Refuse: only vLLM's prefix cache takes a block out of the middle."""
        raise RuntimeError(f"block {block.block_id} is not at the front of the free blocks")

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all blocks, the first to be taken first."""
        return self._stack[::-1]
