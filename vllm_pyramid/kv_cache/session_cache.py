# SPDX-License-Identifier: Apache-2.0
"""Sessions: what evicted requests save in free blocks for the next turn of their conversation.

    positions   0 ..... skip of a layer ........ point | .......... end of the request
    layer 0     [ given back ][ base                      ][ bundle ][ bundle ]
    layer m-1   [ given back         ][ base              ][ bundle ][ bundle ]

All that the layers hold up to the latest eviction is one bundle of the pool, the base; a lookup
finds it whole or not at all. What the layers have computed since is a bundle per range of
positions, like that of a prefix. Each bundle is named by vLLM's hash of the tokens up to its end
and by what an evicted cache depends on apart from these: policy, budget, and the points at which
the request evicted.

The bundles of a session are idle from the start: their blocks count as free and are dissolved when
blocks are needed, the base last. A request that continues a session copies it, so no step writes to
it. What stays in place at evictions (`RetentionPlan.in_place`) is not in the base: it is an exact
prefix, whose bundles the request that continues has, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.evicted_names import session_name
from vllm_pyramid.kv_cache.new_blocks import begin_tables
from vllm_pyramid.plan import RetentionPlan

# Turns that end inside a block and whose base is known; a base of an older one is found by the
# tokens up to its block's end alone.
MAX_TURNS = 1 << 14


@dataclass(frozen=True)
class SessionSnapshot:
    """A session in the pool, or the part of it with which a request continues.

    Attributes:
        plan: the plan of the request that continues.
        number: the eviction behind which the session is, as that request counts.
        point: tokens computed at that eviction.
        skip: `[layers]` tokens that the eviction skips.
        bundles: the base, and the bundles behind it, as far as the device has them.
        in_host: the names of those that come behind these, which the tier below the pool has.
        hashes: the hashes of all whole bundles from position 0 on.
        tokens: tokens up to the end of the last bundle, or up to the turn's end inside the base.
        origin: the request that evicted.
        front: the names of the bundles of what stayed in place, which stand before the base.
        shared: how many of these the device has; the others are in the tier below.
    """

    plan: RetentionPlan
    number: int
    point: int
    skip: npt.NDArray[np.int32]
    bundles: Sequence[BlockBundle]
    in_host: Sequence[BlockHash]
    hashes: Sequence[BlockHash]
    tokens: int
    origin: str
    front: Sequence[BlockHash]
    shared: int

    @property
    def shared_names(self) -> Sequence[BlockHash]:
        """Return the names of what stayed in place, as far as the device has its bundles."""
        return self.front[: self.shared]

    @property
    def num_blocks(self) -> int:
        """Return the number of the device's blocks in all layers."""
        return sum(len(bundle.blocks) for bundle in self.bundles)


class SessionCache:
    """Sessions in the pool, and the layers' tables that contain their blocks."""

    def __init__(
        self, pool: BundlePool, managers: Sequence[SingleTypeKVCacheManager], tokens: int
    ) -> None:
        self._pool, self._managers, self._tokens = pool, managers, tokens
        # For each turn that ends inside a block, by `turn_name`, the latest last: its base, and the
        # hash of the bundle before it. How many turns there are behind each of these bundles.
        self._turns: dict[BlockHash, tuple[BlockHash, BlockHash]] = {}
        self._behind: Counter[BlockHash] = Counter()

    def find(
        self,
        hashes: Sequence[BlockHash],
        plan: RetentionPlan,
        keys: dict[int, bytes],
        most: int,
        least: Callable[[int], int],
        covered: Callable[[Sequence[BlockHash]], int],
        turn: Callable[[int, bytes], BlockHash | None],
    ) -> SessionSnapshot | None:
        """Return the session that has most of a request's tokens; None if there is none.

        Args:
            keys: see `EvictedNames`.
            most: the most tokens that the session may have.
            least: tokens that must remain to be computed before an eviction at a given point.
            covered: how many of given bundles the stock groups can continue with.
            turn: `turn_name` of the request, by the point of an eviction and its key; None where
                the stock groups can continue at the edges of blocks alone.
        """
        limit, front = most, hashes[: self._front(plan)]
        missing = front[self._pool.longest_prefix(front) :]
        if self._pool.tier.longest_prefix(missing) < len(missing) or len(front) < self._front(plan):
            return None
        for number in reversed(keys):
            point, key = plan.computed_at(number), keys[number]
            found = self._find_whole(hashes, plan, number, key, limit, least, covered)
            if found is None and point <= limit and self._knows_turns(hashes, point):
                name = turn(point, key)
                if name is not None:
                    found = self._find_turn(hashes, plan, number, name, least)
            if found is not None:
                return found
            limit = min(most, point - least(point))  # for the session before this eviction
        return None

    def _find_whole(
        self,
        hashes: Sequence[BlockHash],
        plan: RetentionPlan,
        number: int,
        key: bytes,
        limit: int,
        least: Callable[[int], int],
        covered: Callable[[Sequence[BlockHash]], int],
    ) -> SessionSnapshot | None:
        """Return a session behind an eviction, up to the end of a block at `limit` or before."""
        cached, tier, point = self._pool.bundles, self._pool.tier, plan.computed_at(number)
        first, last = self._base(point), min(limit // self._tokens, len(hashes))
        if last <= first:
            return None
        base = session_name(hashes[first], key)
        if base not in cached and base not in tier:
            return None
        names = [session_name(block_hash, key) for block_hash in hashes[first:last]]
        on_device = self._pool.longest_prefix(names)
        there = on_device + tier.longest_prefix(names[on_device:])
        if there and not on_device and not self._fits(base, plan, number):
            return None
        count = covered(hashes[: first + there])
        end = plan.prompt_len
        if 0 < end - count * self._tokens < least(end):  # it evicts there, if nothing goes
            count = covered(hashes[: max(end - least(end), 0) // self._tokens])
        if count <= first:
            return None  # the base is found whole or not at all
        names = names[: count - first]
        bundles, in_host = [cached[name] for name in names[:on_device]], names[on_device:]
        return self._snapshot(plan, number, bundles, in_host, hashes[:count], count * self._tokens)

    def _knows_turns(self, hashes: Sequence[BlockHash], point: int) -> bool:
        """Return whether turns are known that end in the same block: few requests have to be asked
        for the names of all of theirs."""
        whole = point // self._tokens
        return 0 < whole <= len(hashes) and hashes[whole - 1] in self._behind

    def _find_turn(
        self,
        hashes: Sequence[BlockHash],
        plan: RetentionPlan,
        number: int,
        name: BlockHash,
        least: Callable[[int], int],
    ) -> SessionSnapshot | None:
        """Return a session that ends with the turn itself, inside a block, whatever followed it."""
        cached, tier, point = self._pool.bundles, self._pool.tier, plan.computed_at(number)
        if 0 < plan.prompt_len - point < least(plan.prompt_len):
            return None
        base, _ = self._turns.get(name, (name, name))
        known = hashes[: self._base(point)]
        if base in cached:
            return self._snapshot(plan, number, [cached[base]], [], known, point)
        if tier.longest_prefix([base]) and self._fits(base, plan, number):
            return self._snapshot(plan, number, [], [base], known, point)
        return None

    def _fits(self, base: BlockHash, plan: RetentionPlan, number: int) -> bool:
        """Return whether a base below the pool has the blocks that this request's would have."""
        starts = self.heads(plan.skip_after(number)) + self._front(plan)
        end = self._base(plan.computed_at(number)) + 1
        return self._pool.tier.num_blocks(base) == int((end - starts).sum())

    def _snapshot(
        self,
        plan: RetentionPlan,
        number: int,
        bundles: Sequence[BlockBundle],
        in_host: Sequence[BlockHash],
        hashes: Sequence[BlockHash],
        tokens: int,
    ) -> SessionSnapshot:
        origin = bundles[0].origin if bundles else self._pool.tier.origin(in_host[0])
        assert origin is not None, "a base has an origin"
        point, skip = plan.computed_at(number), plan.skip_after(number)
        front, found = hashes[: self._front(plan)], (bundles, in_host, hashes, tokens)
        shared = self._pool.longest_prefix(front)
        return SessionSnapshot(plan, number, point, skip, *found, origin, front, shared)

    def touch(self, session: SessionSnapshot) -> None:
        """Make a session the last to be dissolved, and its base last of all."""
        for bundle in reversed(session.bundles):
            self._pool.touch_bundle(bundle.hash)

    def heads(self, skip: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the blocks that are given back from the head of each layer, `[layers]`."""
        heads: npt.NDArray[np.int64] = skip.astype(np.int64) // self._tokens
        return heads

    def _front(self, plan: RetentionPlan) -> int:
        """Return the bundles of what stays in place."""
        return plan.in_place // self._tokens

    def num_rows(self, session: SessionSnapshot) -> int:
        """Return the blocks of a layer's table that a request begins with, its head included."""
        return -(-session.tokens // self._tokens)

    def adopt(
        self, request_id: str, session: SessionSnapshot
    ) -> tuple[list[Sequence[KVCacheBlock]], list[Sequence[KVCacheBlock]]]:
        """Fill a request's tables with blocks of its own, in the places of a session's.

        They have the session's heads and what stayed in place, if anything did, and are empty else.
        What the tier below the pool has is copied from there, by its own order.

        Returns:
            `[layers]`: the session's blocks on the device, and the request's blocks, into the first
            of which they are to be copied.
        """
        front = len(session.front)
        heads: list[int] = self.heads(session.skip).tolist()
        starts = [head + front for head in heads]
        first, behind = self._base(session.point), session.bundles[1:]
        self.touch(session)
        of_base = iter(session.bundles[0].blocks if session.bundles else ())
        sources: list[Sequence[KVCacheBlock]] = [
            [
                *(next(of_base) for _ in range(first + 1 - start) if session.bundles),
                *(bundle.blocks[layer] for bundle in behind),
            ]
            for layer, start in enumerate(starts)
        ]
        self._pool.tier.pin(session.in_host)
        counts = [self.num_rows(session) - start for start in starts]
        own = begin_tables(self._pool, self._managers, request_id, heads, counts, front)
        self._load(session, own, [first + 1 - start for start in starts])
        return sources, own

    def _load(
        self, session: SessionSnapshot, own: Sequence[Sequence[KVCacheBlock]], of_base: list[int]
    ) -> None:
        """Order the copies of what the tier has of a session to a request's `own[layers][blocks]`.

        The base has `of_base[layers]` blocks.
        """
        tier = self._pool.tier
        for index, name in enumerate(session.in_host, len(session.bundles)):
            if not index:
                parts = (blocks[:count] for blocks, count in zip(own, of_base, strict=True))
                tier.load(name, list(chain.from_iterable(parts)))
                continue
            places = (count + index - 1 for count in of_base)
            tier.load(name, [blocks[at] for blocks, at in zip(own, places, strict=True)])

    def keep(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        starts: npt.NDArray[np.int32],
        point: int,
        key: bytes,
        tokens: int,
        origin: str,
        turn: BlockHash | None,
    ) -> None:
        """Move a request's blocks out of its tables into a session, if its base is complete.

            before   [ null ][ in place ][ base         ][ bundle ][ bundle ][ rest
            after    [ null ][ in place ][ null ... null                   ][ rest

        Args:
            starts: `[layers]` tokens skipped now, with those that stay in place.
            point: tokens computed at the latest eviction.
            key: see `EvictedNames`. turn: `turn_name` at the latest eviction.
            tokens: tokens that are computed; no step writes to them any more.
            origin: the request that evicted.
        """
        first, end = self._base(point), min(tokens // self._tokens, len(hashes))
        name = session_name(hashes[first], key) if end > first else turn
        if name is None:
            return
        null = self._pool.null_block
        tables = [manager.req_to_blocks[request_id] for manager in self._managers]
        for index in range(end - 1, first, -1):
            blocks = [table[index] for table in tables]
            if self._pool.add_idle(session_name(hashes[index], key), blocks):
                for table in tables:
                    table[index] = null
        heads = self.heads(starts).tolist()
        parts = [table[head : first + 1] for table, head in zip(tables, heads, strict=True)]
        if turn is not None:
            self._note(turn, name, hashes[point // self._tokens - 1])
        if self._pool.add_idle(name, list(chain.from_iterable(parts)), origin):
            for table, head in zip(tables, heads, strict=True):
                table[head : first + 1] = [null] * (first + 1 - head)

    def _note(self, turn: BlockHash, base: BlockHash, before: BlockHash) -> None:
        """Let the latest base of a turn be found by the turn, which ends behind a bundle."""
        self._forget_turn(turn)
        self._turns[turn] = base, before
        self._behind[before] += 1
        if len(self._turns) > MAX_TURNS:
            self._forget_turn(next(iter(self._turns)))

    def _forget_turn(self, turn: BlockHash) -> None:
        if (known := self._turns.pop(turn, None)) is not None:
            self._behind[known[1]] -= 1
            if not self._behind[known[1]]:
                del self._behind[known[1]]

    def _base(self, point: int) -> int:
        """Return the last bundle of the base: that of the last token before an eviction."""
        return -(-point // self._tokens) - 1
