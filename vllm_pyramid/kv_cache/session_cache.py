# SPDX-License-Identifier: Apache-2.0
"""States that evicted requests leave in free blocks, for the next turn of their conversation.

    positions   0 ..... skip of a layer ........ point | .......... end of the request
    layer 0     [ given back ][ base                      ][ row ][ row ]
    layer m-1   [ given back         ][ base              ][ row ][ row ]

What all layers hold up to the latest eviction is one row of the pool, the base, which is found
whole or not at all. What they have computed since is a row for each range of positions, as that of
a prefix. All are named by vLLM's hash of the tokens up to their end, and by what an evicted cache
depends on beside these: policy, budget, and the points at which it was evicted.

They belong to nobody, count as free, and are dissolved when blocks are needed, the base last.
Whoever goes on from a state copies it, so nothing writes to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.plan import Plan, RetentionPlan
from vllm_pyramid.policy.request import ServedRequest


@dataclass(frozen=True)
class Conversation:
    """What a request says of its conversation.

    Attributes:
        turns: tokens at which the prompts of earlier turns ended.
        keys: of each eviction that gives something, by its number: what the state behind it depends
            on beside the tokens. None where nothing is kept.
        points: of the same, in their order, the tokens computed there, and that again.
    """

    turns: tuple[int, ...]
    keys: dict[int, bytes] = field(default_factory=dict)
    points: tuple[tuple[int, bytes], ...] = ()

    def suffix(self, end: int) -> bytes | None:
        """What the KV of the first `end` tokens depends on beside these; None before an eviction.

        An eviction at `end` comes behind the attention of the last of them, and changes nothing.
        """
        count = bisect_left(self.points, end, key=itemgetter(0))
        return _suffix(self.points[count - 1][1]) if count else None

    @classmethod
    def of(cls, served: ServedRequest, plan: Plan, keeps: bool) -> Conversation | None:
        """Of a request; None if it does not say that it belongs to one.

        Args:
            keeps: whether states are kept and found.
        """
        if served.turns is None:
            return None
        keys: dict[int, bytes] = {}
        points: list[tuple[int, bytes]] = []
        if keeps:
            assert isinstance(plan, RetentionPlan), "policies that solve lengths are refused"
            policy = served.policy
            budget = (served.budget or policy.budget).with_floor(policy.min_tokens)
            text = f"{policy.model_dump_json()} {budget.value} {budget.min_tokens}"
            key = sha256(text.encode())
            for number in plan.giving:
                point = plan.computed_at(number)
                key.update(f" {point}".encode())
                keys[number] = key.digest()
                points.append((point, keys[number]))
        return cls(served.turns, keys, tuple(points))


@dataclass(frozen=True)
class SessionSnapshot:
    """A state in the pool, or as much of one as a request goes on with.

    Attributes:
        number: of the eviction behind which it is, as the request counts. point: tokens computed
            there. skip: `[layers]` of that eviction.
        rows: the base, and those behind it. hashes: of all rows up to the last one, from position 0
            on. tokens: up to the last one's end.
    """

    number: int
    point: int
    skip: npt.NDArray[np.int32]
    rows: Sequence[BlockBundle]
    hashes: Sequence[BlockHash]
    tokens: int

    @property
    def blocks(self) -> int:
        """Blocks of all layers."""
        return sum(len(row.blocks) for row in self.rows)

    @property
    def origin(self) -> str:
        """The request that evicted."""
        assert self.rows[0].origin is not None
        return self.rows[0].origin


class SessionCache:
    """States in the pool, and the tables of layers in which their blocks stand.

    Args:
        managers: of the layers, whose blocks all have `tokens` tokens.
    """

    def __init__(
        self, pool: BundlePool, managers: Sequence[SingleTypeKVCacheManager], tokens: int
    ) -> None:
        self._pool, self._managers, self._tokens = pool, managers, tokens

    def find(
        self,
        hashes: Sequence[BlockHash],
        plan: Plan,
        keys: dict[int, bytes],
        most: int,
        least: Callable[[int], int],
        covered: Callable[[Sequence[BlockHash]], int],
    ) -> SessionSnapshot | None:
        """The state that has most of a request's tokens; None if there is none.

        Args:
            hashes: of the request's rows. keys: see `Conversation`.
            most: tokens that it may have. least: that are to be left before an eviction at so many
                tokens.
            covered: with how many of these rows layers beside those that evict can go on.
        """
        limit, rows = most, self._pool.rows
        for number in reversed(keys):
            point, key = plan.computed_at(number), keys[number]
            first, last = self._base(point), min(limit // self._tokens, len(hashes))
            limit = min(most, point - least(point))  # of the state before this eviction
            if last <= first or _name(hashes[first], key) not in rows:
                continue
            names = [_name(block_hash, key) for block_hash in hashes[first:last]]
            count = covered(hashes[: first + self._pool.longest(names)])
            end = plan.prompt_len
            if 0 < end - count * self._tokens < least(end):  # it evicts there, if nothing goes
                count = covered(hashes[: max(end - least(end), 0) // self._tokens])
            if count <= first:
                continue  # the base is not found in part
            found = [rows[name] for name in names[: count - first]]
            skip = plan.skip_after(number)
            return SessionSnapshot(number, point, skip, found, hashes[:count], count * self._tokens)
        return None

    def touch(self, state: SessionSnapshot) -> None:
        """Let a state be the last to be dissolved, and its base last of all."""
        for row in reversed(state.rows):
            self._pool.touch_row(row.hash)

    def heads(self, skip: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """`[layers]` blocks that are given back from the head of each."""
        heads: npt.NDArray[np.int64] = skip.astype(np.int64) // self._tokens
        return heads

    def adopt(
        self, request_id: str, state: SessionSnapshot
    ) -> tuple[list[Sequence[KVCacheBlock]], list[Sequence[KVCacheBlock]]]:
        """Begin a request's tables with blocks of its own, as a state's stand in them.

        Returns:
            `[layers]`: the state's blocks, and those into which they are to be copied.
        """
        base, *behind = state.rows
        heads, first = self.heads(state.skip), self._base(state.point)
        self.touch(state)
        of_base = iter(base.blocks)
        sources = [
            [*(next(of_base) for _ in range(first + 1 - head)), *(row.blocks[i] for row in behind)]
            for i, head in enumerate(heads.tolist())
        ]
        blocks = iter(self._pool.get_new_blocks(sum(map(len, sources))))
        own: list[Sequence[KVCacheBlock]] = []
        for manager, head, of_layer in zip(self._managers, heads.tolist(), sources, strict=True):
            new = [next(blocks) for _ in of_layer]
            table = manager.req_to_blocks[request_id]
            assert not table, f"{request_id} has blocks already"
            table.extend([self._pool.null_block] * head)
            table.extend(new)
            if manager.records_new_block_ids:
                manager.new_block_ids.extend(block.block_id for block in new)
            own.append(new)
        return list(sources), own

    def keep(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        skip: npt.NDArray[np.int32],
        point: int,
        key: bytes,
        tokens: int,
        origin: str,
    ) -> None:
        """Take what a request holds out of its tables, as a state; nothing if its base is not full.

        Args:
            hashes: of its rows. skip: `[layers]` in force. point: tokens at its latest eviction.
            key: see `Conversation`. tokens: that are computed, no step writes to these any more.
            origin: the request that evicted.
        """
        first, end = self._base(point), min(tokens // self._tokens, len(hashes))
        if end <= first:
            return
        null = self._pool.null_block
        tables = [manager.req_to_blocks[request_id] for manager in self._managers]
        for index in range(end - 1, first, -1):
            blocks = [table[index] for table in tables]
            if self._pool.offer(_name(hashes[index], key), blocks):
                for table in tables:
                    table[index] = null
        heads = self.heads(skip).tolist()
        parts = [table[head : first + 1] for table, head in zip(tables, heads, strict=True)]
        name = _name(hashes[first], key)
        if self._pool.offer(name, list(chain.from_iterable(parts))):
            self._pool.rows[name].origin = origin
            for table, head in zip(tables, heads, strict=True):
                table[head : first + 1] = [null] * (first + 1 - head)

    def _base(self, point: int) -> int:
        """The row in which the last token before an eviction stands, with which the base ends."""
        return -(-point // self._tokens) - 1


def _name(block_hash: BlockHash, key: bytes) -> BlockHash:
    """The name of a state's row beside that of a prefix, which holds the full cache."""
    return BlockHash(block_hash + _suffix(key))


def _suffix(key: bytes) -> bytes:
    return b"@" + key
