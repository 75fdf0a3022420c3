# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: which layers each has, and a block pool for every one of them.

    layers   0  1  2  3 | 4  5  6
    stage    0          | 1              a worker has the caches of its stage's layers alone
    pool     [0 .. P-1] | [0 .. P-1]     so block 5 of one stage is not block 5 of the other

vLLM counts one pool for all layers of the model. Its question is always "is what a request needs
more than what is free?", two numbers. With stages the answer must be yes where one of them lacks
blocks, so the numbers are those of the scarcest: free is the least of all stages, and needed is as
much more than that as the stage lacks that lacks most (`PipelinePools.bottleneck`).

What requests share are rows of all layers (`bundles.py`), and so of all stages: a row that nobody
uses counts as free in each of them, and where one of them needs its blocks, all get theirs back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool

Numbers = npt.NDArray[np.int64]


class _LayerSpec(Protocol):
    @property
    def num_layers(self) -> int: ...

    @property
    def stages(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class PipelineLayout:
    """The layers that evict in each pipeline stage, numbered through from the bottom.

    Attributes:
        ends: one behind the last layer of each stage.
    """

    ends: tuple[int, ...]

    @classmethod
    def of(cls, spec: _LayerSpec) -> PipelineLayout:
        """As a layer's spec says; one stage where it says nothing."""
        ends: list[int] = np.cumsum(spec.stages or (spec.num_layers,)).tolist()
        return cls(tuple(ends))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return (0, *self.ends[:-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def of_layer(self, layer: int) -> int:
        """The stage of a layer."""
        return int(np.searchsorted(self.ends, layer, side="right"))

    def sums(self, of_layers: npt.NDArray[Any]) -> Numbers:
        """`[stages]`: of `[layers]` what each stage's add up to."""
        sums: Numbers = np.add.reduceat(of_layers.astype(np.int64), self.starts)
        return sums


class StagePool(BundlePool):
    """The blocks of one stage.

    Args:
        whole: of which it is a part. stage: its number.
    """

    def __init__(self, whole: PipelinePools, stage: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole, self._stage = whole, stage

    def count_idle(self, num_blocks: int) -> None:
        """So many of its blocks are an idle row's now, or of one that is none any more."""
        self._idle_blocks += num_blocks

    def _dissolve_oldest(self) -> None:
        self._whole.dissolve_for(self._stage)


class PipelinePools(BundlePool):
    """A block pool for each of several stages, and in front of them what vLLM asks.

    It has no blocks of its own, but the rows: their blocks are those of all stages. All blocks
    have as many tokens, since V is on the device.

    Attributes:
        stages: which layers each has. pools: of the stages.
    """

    def __init__(
        self, num_gpu_blocks: int, *args: Any, stages: PipelineLayout, **kwargs: Any
    ) -> None:
        super().__init__(1, *args, **kwargs)
        self.num_gpu_blocks = num_gpu_blocks  # of each
        self.stages = stages
        self.row_counts = stages.sizes
        self.pools = [
            StagePool(self, stage, num_gpu_blocks, *args, **kwargs) for stage in range(len(stages))
        ]

    def of_layer(self, layer: int) -> BundlePool:
        """See the base."""
        return self.pools[self.stages.of_layer(layer)]

    def free_by_stage(self) -> Numbers:
        """See the base."""
        return np.array([pool.get_num_free_blocks() for pool in self.pools], np.int64)

    def bottleneck(self, needed: Numbers | Sequence[int]) -> int:
        """See the base."""
        free = self.free_by_stage()
        return int(free.min() + (needed - free).max())

    def get_blocks_of_layers(self, counts: Numbers) -> list[KVCacheBlock]:
        """See the base."""
        return self.get_blocks_of_stages(self.stages.sums(counts))

    def get_blocks_of_stages(self, counts: Numbers) -> list[KVCacheBlock]:
        """See the base."""
        found: list[KVCacheBlock] = []
        for pool, count in zip(self.pools, counts.tolist(), strict=True):
            found += pool.get_new_blocks(count)
        return found

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Each to its own stage's pool, in the order in which they are given."""
        of_pools: list[list[KVCacheBlock]] = [[] for _ in self.pools]
        for block in ordered_blocks:
            index = next(
                index
                for index, pool in enumerate(self.pools)
                if pool.blocks[block.block_id] is block
            )
            of_pools[index].append(block)
        for pool, blocks in zip(self.pools, of_pools, strict=True):
            pool.free_blocks(blocks)

    def get_num_free_blocks(self) -> int:
        """Of the stage that has fewest."""
        return min(pool.get_num_free_blocks() for pool in self.pools)

    def get_new_blocks(self, num_blocks: int) -> NoReturn:
        """Nobody knows of which stage."""
        raise AssertionError("blocks are taken from the pool of a stage")

    def reset_prefix_cache(self) -> bool:
        """As vLLM's: False while requests hold blocks."""
        if not all(pool.reset_prefix_cache() for pool in self.pools):
            return False
        while self.idle:
            self._dissolve_oldest()
        return True

    # Rows -------------------------------------------------------------------------------------

    def dissolve_for(self, stage: int) -> None:
        """Dissolve the least recently used row that has blocks of a stage.

        Blocks that are set aside may be of the other stages alone. All other rows have some of
        each, so of one prompt the deepest still goes first.
        """
        self._dissolve(next(row for row in self.idle if row.counts[stage]))

    def _rest(self, row: BlockBundle) -> None:
        self.idle[row] = None
        for pool, count in zip(self.pools, row.counts, strict=True):
            pool.count_idle(count)

    def _wake(self, row: BlockBundle) -> None:
        del self.idle[row]
        for pool, count in zip(self.pools, row.counts, strict=True):
            pool.count_idle(-count)
