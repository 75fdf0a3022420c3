# SPDX-License-Identifier: Apache-2.0
"""Blocks that requests share: all layers' blocks of one range of positions, as one thing.

    positions      0 .. 15     16 .. 31    32 .. 47
    layer 0        [ b3  ]     [ b9  ]     [ b1  ]
    layer 1        [ b7  ]     [ b2  ]     [ b8  ]      one column of this is a row
    layer m-1      [ b5  ]     [ b4  ]     [ b6  ]
                   hash 0      hash 1      hash 2

Layers have tables of their own, but what they hold of a prefix is found, shared and forgotten
together, so the layers cannot come to disagree about it, and a lookup costs as much as with one
table for all layers.

A row is in use while requests refer to it. Then it is idle: its blocks count as free and go to
whoever needs blocks, least recently used rows first, and of one prompt the deepest first, as in
vLLM. So of layers that evict a row is never there without the row before it, and a lookup is a
bisection.

Two requests that compute one prefix at the same time have two rows of one hash. The first is found
by others. The second, its twin, takes its place if the first is dissolved, and otherwise ends with
its request.

With pipeline stages a row has blocks of several pools (`stages.py`), and lives and dies in all of
them at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock


class BlockBundle:
    """The blocks of all layers at one range of positions, none of which is written any more.

    Attributes:
        hash: vLLM's, of the tokens up to its end and of all else that their KV depends on (LoRA
            adapter, images, prompt embeddings, `cache_salt`); of what is not the full cache's KV,
            more behind it. None of blocks that are set aside.
        blocks: layer by layer. counts: how many of them each pipeline stage has; empty where there
            is one stage. refs: requests that have them in their tables.
        scheduled: whether the step that computes them has been scheduled; until then they can be
            read in that step, behind what writes them, but not before it.
        origin: of the base of a state (`session_cache.py`), the request that evicted.
        holders: of layers that evict, the requests that `refs` counts (`shared_blocks.py` keeps
        it).
    """

    __slots__ = ("blocks", "counts", "hash", "holders", "origin", "refs", "scheduled")

    def __init__(
        self,
        block_hash: BlockHash | None,
        blocks: Sequence[KVCacheBlock],
        counts: tuple[int, ...] = (),
        refs: int = 1,
    ) -> None:
        self.hash = block_hash
        self.blocks = blocks
        self.counts = counts
        self.refs = refs
        self.scheduled = False
        self.origin: str | None = None
        self.holders: frozenset[str] = frozenset()


class BundlePool(BlockPool):
    """vLLM's block pool, with rows in place of its own prefix cache.

    Blocks belong to the free queue, to one request, or to one row.

    Attributes:
        rows: those that a lookup finds, by hash.
        idle: those of them that nobody refers to, the next to be dissolved first.
        twins: rows in use whose hash is another row's, by hash.
        row_counts: see `BlockBundle.counts`, of all rows with a hash.
    """

    row_counts: tuple[int, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.enable_caching, "rows take the place of vLLM's own cache"
        self.rows: dict[BlockHash, BlockBundle] = {}
        self.idle: dict[BlockBundle, None] = {}
        self.twins: dict[BlockHash, list[BlockBundle]] = {}
        self._idle_blocks = 0

    # Rows -------------------------------------------------------------------------------------

    def longest(self, names: Sequence[BlockHash]) -> int:
        """How many of these, each of which goes on from the one before, are there."""
        return bisect_left(names, True, key=lambda name: name not in self.rows)

    def publish(self, block_hash: BlockHash, blocks: Sequence[KVCacheBlock]) -> BlockBundle:
        """Make a row of a request's blocks, to which that request refers."""
        row = BlockBundle(block_hash, blocks, self.row_counts)
        if self.rows.setdefault(block_hash, row) is not row:
            self.twins.setdefault(block_hash, []).append(row)
        return row

    def withdraw(self, row: BlockBundle) -> None:
        """Undo `publish`: the blocks are the request's alone again."""
        assert row.refs == 1, "others use what was never computed"
        self._forget(row)

    def idle_rows(self, hashes: Sequence[BlockHash]) -> list[BlockBundle]:
        """Those of the rows of these hashes whose blocks count as free."""
        return [row for row in map(self.rows.__getitem__, hashes) if not row.refs]

    def adopt(self, hashes: Sequence[BlockHash]) -> tuple[list[BlockBundle], int]:
        """Refer to the rows of these hashes; returns them, and how many of them were idle."""
        rows = [self.rows[block_hash] for block_hash in hashes]
        revived = 0
        for row in rows:
            if not row.refs:
                self._wake(row)
                revived += 1
            row.refs += 1
        return rows, revived

    def release(self, rows: Sequence[BlockBundle]) -> int:
        """Drop a request's references to its rows, from position 0 on; returns how many it used
        alone.
        """
        ended = 0
        for row in reversed(rows):
            row.refs -= 1
            if row.refs:
                continue
            ended += 1
            if self._known(row) is row:
                self._rest(row)
                continue
            self._forget(row)
            self.free_blocks(row.blocks)
            self.touch_row(row.hash)  # it must outlive those behind it, which are idle by now
        return ended

    def offer(self, block_hash: BlockHash, blocks: Sequence[KVCacheBlock]) -> bool:
        """Make an idle row of blocks; False, and nothing happens, if there is one of that hash."""
        if block_hash in self.rows:
            self.touch_row(block_hash)
            return False
        row = self.rows[block_hash] = BlockBundle(block_hash, blocks, self.row_counts, refs=0)
        row.scheduled = True
        self._rest(row)
        return True

    def touch_row(self, block_hash: BlockHash | None) -> None:
        """If the row of this hash is idle, let it be the last to be dissolved."""
        assert block_hash is not None
        row = self.rows[block_hash]
        if not row.refs:
            del self.idle[row]
            self.idle[row] = None

    def set_aside(
        self, counts: npt.NDArray[np.int64], but: npt.NDArray[np.int64]
    ) -> BlockBundle | None:
        """Blocks that still count as free, and go like an idle row's.

        Args:
            counts: `[stages]`, how many. but: `[stages]` free blocks that must stay what they are:
                the latest that became idle.

        Returns:
            None if there are too few in a stage.
        """
        if (counts > self.free_by_stage() - but).any():
            return None
        of_stages = tuple(counts.tolist()) if self.row_counts else ()
        row = BlockBundle(None, self.get_blocks_of_stages(counts), of_stages, refs=0)
        self._rest(row)
        return row

    def take(self, row: BlockBundle) -> Sequence[KVCacheBlock] | None:
        """The blocks that were set aside, for the caller to own; None if they have gone."""
        if row not in self.idle:
            return None
        self._wake(row)
        return row.blocks

    def _rest(self, row: BlockBundle) -> None:
        self.idle[row] = None
        self._idle_blocks += len(row.blocks)

    def _wake(self, row: BlockBundle) -> None:
        del self.idle[row]
        self._idle_blocks -= len(row.blocks)

    def _dissolve_oldest(self) -> None:
        self._dissolve(next(iter(self.idle)))

    def _dissolve(self, row: BlockBundle) -> None:
        self._wake(row)
        if row.hash is not None:
            self._forget(row)
        self.free_blocks(row.blocks)

    def _known(self, row: BlockBundle) -> BlockBundle:
        assert row.hash is not None
        return self.rows[row.hash]

    def _forget(self, row: BlockBundle) -> None:
        assert row.hash is not None
        twins = self.twins.get(row.hash)
        if self.rows[row.hash] is not row:
            assert twins is not None
            twins.remove(row)
        elif twins:
            self.rows[row.hash] = twins.pop(0)
        else:
            del self.rows[row.hash]
        if twins is not None and not twins:
            del self.twins[row.hash]

    # Pipeline stages (`stages.py`); here there is one ----------------------------------------

    def of_layer(self, layer: int) -> BundlePool:
        """The pool from which a layer's blocks come."""
        return self

    def free_by_stage(self) -> npt.NDArray[np.int64]:
        """`[stages]`: free blocks of each."""
        return np.array([self.get_num_free_blocks()], np.int64)

    def bottleneck(self, needed: npt.NDArray[np.int64] | Sequence[int]) -> int:
        """Blocks that are needed, `[stages]`, as one number to compare with all free blocks."""
        return int(needed[0])

    def get_blocks_of_layers(self, counts: npt.NDArray[np.int64]) -> list[KVCacheBlock]:
        """New blocks layer by layer, `counts` is `[layers]`."""
        return self.get_new_blocks(int(counts.sum()))

    def get_blocks_of_stages(self, counts: npt.NDArray[np.int64]) -> list[KVCacheBlock]:
        """The same, `counts` is `[stages]`."""
        return self.get_new_blocks(int(counts[0]))

    # vLLM's contract --------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Blocks that a request could get: those in the queue, and those of idle rows."""
        return super().get_num_free_blocks() + self._idle_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As vLLM's; idle rows are dissolved where the queue has too few."""
        if num_blocks <= self.get_num_free_blocks():
            while super().get_num_free_blocks() < num_blocks:
                self._dissolve_oldest()
        return super().get_new_blocks(num_blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all rows; False, as in vLLM, while requests hold blocks."""
        if not super().reset_prefix_cache():
            return False
        while self.idle:
            self._dissolve_oldest()
        return True
