# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: which layers each has, and a block pool for every one of them.

    layers   0  1  2  3 | 4  5  6
    stage    0          | 1              a worker has the caches of its stage's layers alone
    pool     [0 .. P-1] | [0 .. P-1]     so block 5 of one stage is not block 5 of the other

vLLM counts one pool for all layers of the model, and only ever compares two numbers: the blocks
that a request needs, and the free blocks. With stages the request must wait if any stage lacks
blocks, so both numbers describe the bottleneck: the free blocks of the stage that has fewest, and
that number plus the greatest shortage of any stage (`PipelinePools.bottleneck`).

Requests share bundles of all layers (`bundles.py`), and so of all stages: an idle bundle counts as
free in every stage, and when one stage needs its blocks, all stages get theirs back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PipelineLayout:
    """Which tables of evicting layers each stage has: `ends` are behind the last table of each."""

    ends: tuple[int, ...]
    tables_per_layer: int = 1

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first table of each stage."""
        return (0, *self.ends[:-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of tables of each stage."""
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def of_table(self, table: int) -> int:
        """Return the stage of a table."""
        return int(np.searchsorted(self.ends, table, side="right"))

    def sums(self, by_table: npt.NDArray[Any]) -> Numbers:
        """Sum `[tables]` numbers over the tables of each stage, `[stages]`."""
        sums: Numbers = np.add.reduceat(by_table.astype(np.int64), self.starts)
        return sums


class StagePool(BundlePool):
    """The blocks of one stage; `whole`, the pools of all stages, keeps the bundles."""

    def __init__(self, whole: PipelinePools, stage: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole, self._stage = whole, stage

    def count_idle(self, num_blocks: int) -> None:
        """Count more idle blocks of this stage, or fewer if the number is negative."""
        self._idle_blocks += num_blocks

    def _dissolve_oldest(self) -> None:
        self._whole.dissolve_for(self._stage)


class PipelinePools(BundlePool):
    """A block pool per stage, behind the one pool that vLLM asks.

    This object has no blocks. It keeps the bundles, which have blocks of all stages. All blocks
    have the same number of tokens, since V is on the device.
    """

    def __init__(
        self, num_gpu_blocks: int, *args: Any, stages: PipelineLayout, **kwargs: Any
    ) -> None:
        super().__init__(1, *args, **kwargs)
        self.num_gpu_blocks = num_gpu_blocks  # of each stage
        self.stages = stages
        self.bundle_counts = stages.sizes
        self.pools = [
            StagePool(self, stage, num_gpu_blocks, *args, **kwargs) for stage in range(len(stages))
        ]
        for pool in self.pools:
            pool.enable_kv_cache_events = False  # this object publishes them

    def of_layer(self, layer: int) -> BundlePool:
        """Return the pool of the layer's stage."""
        return self.pools[self.stages.of_table(layer * self.stages.tables_per_layer)]

    @property
    def idle_blocks(self) -> int:
        """Return the blocks of the idle bundles, of all stages."""
        return sum(pool.idle_blocks for pool in self.pools)

    def free_by_stage(self) -> Numbers:
        """Return the free blocks of each stage, `[stages]`."""
        return np.array([pool.get_num_free_blocks() for pool in self.pools], np.int64)

    def bottleneck(self, needed: Numbers | Sequence[int]) -> int:
        """Return the fewest free blocks plus the greatest shortage of any stage."""
        free = self.free_by_stage()
        return int(free.min() + (needed - free).max())

    def get_blocks_of_layers(self, ends: Sequence[int]) -> list[KVCacheBlock]:
        """Return new blocks, layer by layer, each from its stage's pool."""
        of_stages = [ends[end // self.stages.tables_per_layer - 1] for end in self.stages.ends]
        return self.get_blocks_of_stages(np.diff(of_stages, prepend=0))

    def get_blocks_of_stages(self, counts: Numbers) -> list[KVCacheBlock]:
        """Return new blocks, stage by stage, for `[stages]` counts."""
        blocks: list[KVCacheBlock] = []
        for pool, count in zip(self.pools, counts.tolist(), strict=True):
            blocks += pool.get_new_blocks(count)
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Return each block to its own stage's pool, in the given order."""
        by_pool: list[list[KVCacheBlock]] = [[] for _ in self.pools]
        for block in ordered_blocks:
            index = next(
                index
                for index, pool in enumerate(self.pools)
                if pool.blocks[block.block_id] is block
            )
            by_pool[index].append(block)
        for pool, blocks in zip(self.pools, by_pool, strict=True):
            pool.free_blocks(blocks)

    def get_num_free_blocks(self) -> int:
        """Return the free blocks of the stage that has fewest."""
        return min(pool.get_num_free_blocks() for pool in self.pools)

    def get_new_blocks(self, num_blocks: int) -> NoReturn:
        """Refuse: blocks come from the pool of a stage, which the caller does not name."""
        raise AssertionError("blocks are taken from the pool of a stage")

    def reset_prefix_cache(self) -> bool:
        """Dissolve all bundles; return False, as vLLM does, while requests hold blocks."""
        if not all(pool.reset_prefix_cache() for pool in self.pools):
            return False
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        self._dissolve_all()
        return True

    # Bundles ----------------------------------------------------------------------------------

    def dissolve_for(self, stage: int) -> None:
        """Dissolve the least recently used bundle that has blocks of a stage.

        Reserved blocks may belong to other stages alone. Every other bundle has blocks of each
        stage, so the deepest bundle of a prompt still goes first.
        """
        self._dissolve(next(bundle for bundle in self.idle if bundle.counts[stage]))

    def _count_idle(self, bundle: BlockBundle, sign: int) -> None:
        for pool, count in zip(self.pools, bundle.counts, strict=True):
            pool.count_idle(sign * count)
