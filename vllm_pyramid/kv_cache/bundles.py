# SPDX-License-Identifier: Apache-2.0
"""Bundles of blocks: all layers' blocks at one range of positions, shared as one thing.

    positions      0 .. 15     16 .. 31    32 .. 47
    layer 0        [ b3  ]     [ b9  ]     [ b1  ]
    layer 1        [ b7  ]     [ b2  ]     [ b8  ]      one column of this is a bundle
    layer m-1      [ b5  ]     [ b4  ]     [ b6  ]
                   hash 0      hash 1      hash 2

Each layer has its own block table, but the blocks of a prefix are found, shared and forgotten for
all layers together. So layers cannot disagree about a prefix, and a lookup costs as much as with
one table for all layers.

A bundle is in use while requests refer to it. Afterwards it is idle: its blocks count as free, and
the pool dissolves idle bundles when the free queue runs short, least recently used first and the
deepest of a prompt first, as vLLM does. So no bundle of evicting layers exists without the bundle
before it, and a lookup is a bisection.

Two requests that compute the same prefix at the same time make two bundles of one hash. Lookups
find the first. The second, a duplicate, replaces the first if that one is dissolved, and otherwise
ends with its request.

With pipeline stages a bundle has blocks of several pools (`pipeline_pools.py`), and lives and dies
in all of them at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm_pyramid.kv_cache.announced_block import AnnouncedBlock
from vllm_pyramid.kv_cache.free_blocks import FreeBlockStack
from vllm_pyramid.kv_cache.tier import Tier


class BlockBundle:
    """The blocks of all layers at one range of positions; no step writes to them any more.

    Attributes:
        hash: vLLM's hash of the tokens up to the bundle's end and of all else that their KV depends
            on (LoRA adapter, images, prompt embeddings, `cache_salt`), with a suffix if the blocks
            hold something other than the full cache's KV. None for reserved blocks.
        blocks: the blocks, layer by layer. counts: their number per stage; empty with one stage.
        refs: number of requests that have the blocks in their tables.
        scheduled: whether the step that computes the blocks has been scheduled. Before that, the
            same step can attend to them but cannot copy them.
        origin: for the base of a session (`session_cache.py`), the request that evicted.
        holders: for evicting layers, the requests that `refs` counts; `SharedBlockIndex` sets it.
        announced: what routers know of the bundle that a lookup finds; None without KV events.
    """

    __slots__ = ("announced", "blocks", "counts", "hash", "holders", "origin", "refs", "scheduled")

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
        self.holders: frozenset[Any] = frozenset()
        self.announced: AnnouncedBlock | None = None


class BundlePool(BlockPool):
    """vLLM's block pool, with bundles instead of its prefix cache.

    Each block belongs to the free queue, to one request, or to one bundle.

    Attributes:
        bundles: the bundles that a lookup finds, by hash.
        idle: the bundles without references, reserved blocks included; the first is dissolved
            first.
        duplicates: bundles in use whose hash is another bundle's, by hash.
        bundle_counts: `BlockBundle.counts` of every bundle with a hash and blocks of all layers.
        tier: what is below the pool.
        has_gaps: whether a request may have taken bundles that others in the pool continue.
    """

    bundle_counts: tuple[int, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.enable_caching, "bundles replace vLLM's prefix cache"
        self.free_block_queue = FreeBlockStack(self.free_block_queue.get_all_free_blocks())
        self.bundles: dict[BlockHash, BlockBundle] = {}
        self.idle: dict[BlockBundle, None] = {}
        self.duplicates: dict[BlockHash, list[BlockBundle]] = {}
        self._idle_blocks = 0
        self.tier = Tier()
        self.has_gaps = False

    # Bundles ----------------------------------------------------------------------------------

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of these hashes, each of which continues the one before, are cached."""
        if self.has_gaps:
            return next(
                (n for n, name in enumerate(hashes) if name not in self.bundles), len(hashes)
            )
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self.bundles)

    def publish(
        self,
        block_hash: BlockHash,
        blocks: Sequence[KVCacheBlock],
        counts: tuple[int, ...] | None = None,
    ) -> BlockBundle:
        """Make a bundle of a request's blocks; the request refers to it.

        `counts` are of the blocks, where they are those of some KV heads alone; None: of all.
        """
        bundle = BlockBundle(block_hash, blocks, self.bundle_counts if counts is None else counts)
        if self.bundles.setdefault(block_hash, bundle) is not bundle:
            self.duplicates.setdefault(block_hash, []).append(bundle)
        return bundle

    def withdraw(self, bundle: BlockBundle) -> None:
        """Undo `publish`: the blocks belong to the request alone again."""
        if bundle.refs != 1:
            raise RuntimeError(
                f"{bundle.refs - 1} other requests use blocks that were never computed; report this"
            )
        self._forget(bundle)

    def idle_bundles(self, hashes: Sequence[BlockHash]) -> list[BlockBundle]:
        """Return those bundles of these hashes whose blocks count as free."""
        return [bundle for bundle in map(self.bundles.__getitem__, hashes) if not bundle.refs]

    def adopt(self, hashes: Sequence[BlockHash]) -> tuple[list[BlockBundle], int]:
        """Add a reference to the bundle of each hash; return them, and how many were idle."""
        bundles = [self.bundles[block_hash] for block_hash in hashes]
        revived = 0
        for bundle in bundles:
            if not bundle.refs:
                self._take_from_idle(bundle)
                revived += 1
            bundle.refs += 1
        return bundles, revived

    def release(self, bundles: Sequence[BlockBundle]) -> int:
        """Drop a request's references to bundles; return how many no request refers to any more.

        They are given from position 0 on.
        """
        ended = 0
        for bundle in reversed(bundles):
            bundle.refs -= 1
            if bundle.refs:
                continue
            ended += 1
            assert bundle.hash is not None
            if self.bundles[bundle.hash] is bundle:
                self._make_idle(bundle)
                continue
            self._forget(bundle)
            self.free_blocks(bundle.blocks)
            # The one that remains must outlive the deeper bundles, which are idle by now.
            self.touch_bundle(bundle.hash)
        return ended

    def add_idle(
        self, block_hash: BlockHash, blocks: Sequence[KVCacheBlock], origin: str | None = None
    ) -> bool:
        """Make an idle bundle of blocks that the caller owns.

        Returns False if the hash has a bundle already; the blocks then remain the caller's.
        """
        if block_hash in self.bundles:
            self.touch_bundle(block_hash)
            return False
        bundle = BlockBundle(block_hash, blocks, self.bundle_counts, refs=0)
        bundle.scheduled, bundle.origin = True, origin
        self.bundles[block_hash] = bundle
        self._make_idle(bundle)
        return True

    def touch_bundle(self, block_hash: BlockHash | None) -> None:
        """Make the bundle of this hash the last to be dissolved, if it is idle."""
        assert block_hash is not None
        bundle = self.bundles[block_hash]
        if not bundle.refs:
            del self.idle[bundle]
            self.idle[bundle] = None

    def touch_prefix(self, names: Sequence[BlockHash]) -> None:
        """Do so with the bundles of a prefix, as far as they are there."""
        for name in reversed(names):
            if name in self.bundles:
                self.touch_bundle(name)

    def reserve(
        self, counts: npt.NDArray[np.int64], untouchable: npt.NDArray[np.int64]
    ) -> BlockBundle | None:
        """Reserve `[stages]` blocks that still count as free and are dissolved like an idle bundle.

        `untouchable` `[stages]` free blocks must remain as they are: those that became idle last.
        Returns None if a stage has too few blocks.
        """
        if (counts > self.free_by_stage() - untouchable).any():
            return None
        by_stage = tuple(counts.tolist()) if self.bundle_counts else ()
        bundle = BlockBundle(None, self.get_blocks_of_stages(counts), by_stage, refs=0)
        self._make_idle(bundle)
        return bundle

    def take_reserved(self, bundle: BlockBundle) -> Sequence[KVCacheBlock] | None:
        """Hand reserved blocks to the caller; None if they have been dissolved."""
        if bundle not in self.idle:
            return None
        self._take_from_idle(bundle)
        return bundle.blocks

    def _make_idle(self, bundle: BlockBundle) -> None:
        self.idle[bundle] = None
        self._count_idle(bundle, 1)
        self.tier.idle(bundle)

    def _take_from_idle(self, bundle: BlockBundle) -> None:
        del self.idle[bundle]
        self._count_idle(bundle, -1)

    def _count_idle(self, bundle: BlockBundle, sign: int) -> None:
        self._idle_blocks += sign * len(bundle.blocks)

    def _dissolve_oldest(self) -> None:
        self._dissolve(next(iter(self.idle)))

    def _dissolve(self, bundle: BlockBundle, *, keeps: bool = True) -> None:
        self._take_from_idle(bundle)
        if bundle.hash is not None:
            self._forget(bundle)
            if keeps and bundle.hash not in self.bundles:
                self.tier.store(bundle)
        self.free_blocks(bundle.blocks)

    def _forget(self, bundle: BlockBundle) -> None:
        assert bundle.hash is not None
        duplicates = self.duplicates.get(bundle.hash)
        if self.bundles[bundle.hash] is not bundle:
            assert duplicates is not None
            duplicates.remove(bundle)
        elif duplicates:
            self.bundles[bundle.hash] = duplicates.pop(0)
            self.bundles[bundle.hash].announced = bundle.announced
        else:
            del self.bundles[bundle.hash]
            if bundle.announced is not None:
                bundle.announced.left_device()
        if duplicates is not None and not duplicates:
            del self.duplicates[bundle.hash]

    @property
    def idle_blocks(self) -> int:
        """Return the blocks of the idle bundles, which count as free."""
        return self._idle_blocks

    # Pipeline stages: this pool is that of the only stage ---------------------------------------

    def of_layer(self, layer: int) -> BundlePool:
        """Return the pool from which a layer's blocks come."""
        return self

    def free_by_stage(self) -> npt.NDArray[np.int64]:
        """Return the free blocks of each stage, `[stages]`."""
        return np.array([self.get_num_free_blocks()], np.int64)

    def bottleneck(self, needed: npt.NDArray[np.int64] | Sequence[int]) -> int:
        """Return `[stages]` needed blocks as one number to compare with `get_num_free_blocks`."""
        return int(needed[0])

    def get_blocks_of_layers(self, ends: Sequence[int]) -> list[KVCacheBlock]:
        """Return new blocks, layer by layer; those of a layer end at its number in `ends`."""
        return self.get_new_blocks(ends[-1])

    def get_blocks_of_stages(self, counts: npt.NDArray[np.int64]) -> list[KVCacheBlock]:
        """Return new blocks, stage by stage, for `[stages]` counts."""
        return self.get_new_blocks(int(counts[0]))

    # vLLM's contract --------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Count the blocks that a request could get: in the free queue and in idle bundles."""
        return super().get_num_free_blocks() + self._idle_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the free queue, and dissolve idle bundles if it has too few."""
        if num_blocks <= self.get_num_free_blocks():
            while super().get_num_free_blocks() < num_blocks:
                self._dissolve_oldest()
        return super().get_new_blocks(num_blocks)

    def reset_prefix_cache(self) -> bool:
        """Dissolve all bundles; return False, as vLLM does, while requests hold blocks."""
        if not super().reset_prefix_cache():
            return False
        self._dissolve_all()
        return True

    def _dissolve_all(self) -> None:
        while self.idle:
            bundle = next(iter(self.idle))
            bundle.announced = None  # routers were told that all is cleared
            self._dissolve(bundle, keeps=False)  # nothing shall be found again
