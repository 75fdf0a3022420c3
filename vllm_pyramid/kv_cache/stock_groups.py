# SPDX-License-Identifier: Apache-2.0
"""Blocks of the layers that no policy evicts from: windows that slide, chunks, states, drafts'.

In a hybrid model, and where a draft model has layers of its own, they stand beside the layers that
evict, with blocks from the same pool. vLLM puts each into a group of its own there. They hold what
vLLM's managers say; layers of one spec need and drop the same blocks at the same time, so the first
of them answers for all.

    a window of 3 blocks    [null][null][b7][b2][b9]       after the next block: the head goes

With prefix caching, blocks become rows of their own (`bundles.py`) when they are computed, one for
each kind of layer and range of positions. They are their request's as long as it looks at them, and
idle from then on. A prefix, or a state (`session_cache.py`), is found as far as all that its next
token sees is there, and is copied into blocks of the request's own: what is in a window soon leaves
it again, so there is little to gain from sharing it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool

Numbers: TypeAlias = npt.NDArray[np.int64]
# `SchedulerRequest.suffix`: what the KV of so many tokens depends on beside these.
Suffix: TypeAlias = Callable[[int], bytes | None]

_NO_BOUND = 1 << 40


@dataclass(frozen=True)
class _Kind:
    """Layers of one spec.

    Attributes:
        managers: vLLM's, one a layer. groups: their places among all KV cache groups.
        block_size: tokens of a block. sees: tokens before the one that is computed which a layer
            still looks at, at most. most: blocks that vLLM reserves for a request at most.
        keeps_all: it is the KV of all tokens.
    """

    managers: Sequence[SingleTypeKVCacheManager]
    groups: Sequence[int]
    block_size: int
    sees: int
    most: int
    keeps_all: bool

    @classmethod
    def of(
        cls, spec: KVCacheSpec, members: Sequence[tuple[int, SingleTypeKVCacheManager]]
    ) -> _Kind:
        groups, managers = zip(*members, strict=True)
        sees = _NO_BOUND
        if isinstance(spec, SlidingWindowSpec):
            sees = spec.sliding_window - 1 + spec.extra_retained_tokens
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            sees = spec.attention_chunk_size
        most = managers[0].max_admission_blocks_per_request
        most = _NO_BOUND if most is None else most
        keeps_all = isinstance(spec, FullAttentionSpec)
        return cls(managers, groups, spec.block_size, sees, most, keeps_all)

    def skipped_tokens(self, processed: int) -> int:
        """Tokens that none looks at any more when so many have been processed."""
        return self.managers[0].get_num_skipped_tokens(processed)


@dataclass
class _Tables:
    """What a request holds in these layers.

    Attributes:
        entries: of each kind, entries of a layer's table. nulls: how many of them are null.
        hashes: the request's, which grow as it does. suffix: the request's. noted: its tokens that
            are computed by the end of the step that is being scheduled.
        rows: of each kind, those that others find already, from the first that is not null on.
    """

    entries: list[int]
    nulls: list[int]
    rows: list[list[BlockBundle]]
    hashes: Sequence[BlockHash] = field(default_factory=list)
    suffix: Suffix | None = None
    noted: int = 0


class StockGroups:
    """The layers of a model that keep what vLLM keeps, whatever the policy.

    Args:
        managers: of all KV cache groups of such layers, with their places among all groups.

    Attributes:
        held_blocks: of the pool, held by all requests in these layers.
    """

    def __init__(
        self, managers: Sequence[tuple[int, SingleTypeKVCacheManager]], pool: BundlePool
    ) -> None:
        self._pool = pool
        by_spec: dict[KVCacheSpec, list[tuple[int, SingleTypeKVCacheManager]]] = defaultdict(list)
        for group, manager in managers:
            by_spec[manager.kv_cache_spec].append((group, manager))
        self._kinds = [_Kind.of(spec, members) for spec, members in by_spec.items()]
        self.held_blocks = 0
        self._tables: dict[str, _Tables] = {}
        # Tokens of a row, and of each of a request's hashes; 0 while no prefix is shared.
        self._row = self._hash = 0
        self._noted: set[str] = set()

    def share(self, row_tokens: int, hash_tokens: int) -> bool:
        """From now on let prefixes be found; False if these layers cannot: a state, large blocks.

        Args:
            row_tokens: of a row of the layers that evict. hash_tokens: of one of a request's
                hashes.
        """
        sees = all(kind.keeps_all or kind.sees < _NO_BOUND for kind in self._kinds)
        if not sees or any(row_tokens % kind.block_size for kind in self._kinds):
            return False
        self._row, self._hash = row_tokens, hash_tokens
        return True

    def __len__(self) -> int:
        return sum(len(kind.managers) for kind in self._kinds)

    @property
    def are_drafts(self) -> bool:
        """Whether all are a draft model's, and so the model has none; True where there are none."""
        return all(kind.keeps_all for kind in self._kinds)

    def block_sizes(self, max_model_len: int) -> list[int]:
        """Tokens of blocks; those left out that hold whole sequences, such as states'."""
        return [kind.block_size for kind in self._kinds if kind.block_size < max_model_len]

    def missing_blocks(
        self, request_id: str, num_tokens: int, *, capped: bool = False, hit: int = 0
    ) -> int:
        """Blocks that a request needs in all these layers for so many tokens.

        Args:
            capped: count what it holds at any one time at most (vLLM's admission).
            hit: tokens that it finds, where it has no blocks yet.
        """
        tables, missing = self._tables.get(request_id), 0
        for index, kind in enumerate(self._kinds):
            needed = cdiv(num_tokens, kind.block_size)
            if tables is None and hit:
                needed -= self._first_row(kind, hit) * self._per_row(kind)
            if capped:
                needed = min(needed, kind.most)
            have = 0 if tables is None else tables.entries[index]
            missing += max(needed - have, 0) * len(kind.managers)
        return missing

    def allocate(self, request_id: str, num_tokens: int) -> dict[int, list[KVCacheBlock]]:
        """The next blocks of a request, by KV cache group; only of groups that get some."""
        tables = self._tables_of(request_id)
        found: dict[int, list[KVCacheBlock]] = {}
        for index, kind in enumerate(self._kinds):
            count = cdiv(num_tokens, kind.block_size) - tables.entries[index]
            if count <= 0:
                continue
            for group, manager, own in self._extend(request_id, kind, count):
                if manager.records_new_block_ids:
                    manager.new_block_ids.extend(block.block_id for block in own)
                found[group] = own
            tables.entries[index] += count
        return found

    def _tables_of(self, request_id: str) -> _Tables:
        if (tables := self._tables.get(request_id)) is None:
            kinds = len(self._kinds)
            rows: list[list[BlockBundle]] = [[] for _ in self._kinds]
            tables = self._tables[request_id] = _Tables([0] * kinds, [0] * kinds, rows)
        return tables

    def _extend(
        self, request_id: str, kind: _Kind, count: int
    ) -> list[tuple[int, SingleTypeKVCacheManager, list[KVCacheBlock]]]:
        """So many new blocks at the end of each layer's table."""
        blocks = self._pool.get_new_blocks(count * len(kind.managers))
        self.held_blocks += len(blocks)
        found = []
        for place, (group, manager) in enumerate(zip(kind.groups, kind.managers, strict=True)):
            own = blocks[place * count : (place + 1) * count]
            manager.req_to_blocks[request_id].extend(own)
            found.append((group, manager, own))
        return found

    def drop_unseen(self, request_id: str, processed: int) -> None:
        """Give back the blocks that no later token of a request looks at.

        Args:
            processed: tokens whose steps have ended.
        """
        if (tables := self._tables.get(request_id)) is None:
            return
        for index, kind in enumerate(self._kinds):
            end = min(kind.skipped_tokens(processed) // kind.block_size, tables.entries[index])
            end -= end % self._per_row(kind)
            if end > tables.nulls[index]:
                self._drop(request_id, tables, index, end)

    def _drop(self, request_id: str, tables: _Tables, index: int, end: int) -> None:
        """Take a kind's blocks out of its tables up to entry `end`: rows stay, others are freed."""
        kind, start, null = self._kinds[index], tables.nulls[index], self._pool.null_block
        per_row, rows = self._per_row(kind), tables.rows[index]
        held = [manager.req_to_blocks[request_id] for manager in kind.managers]
        count = min(len(rows), (end - start) // per_row)
        self._pool.release(rows[:count])
        del rows[:count]
        first = start + count * per_row
        self._pool.free_blocks([block for table in held for block in table[first:end]])
        for table in held:
            table[start:end] = [null] * (end - start)
        self.held_blocks -= (end - start) * len(held)
        tables.nulls[index] = end

    def forget(self, request_id: str) -> None:
        """The managers are about to free all that a request holds; others may find some of it."""
        self._noted.discard(request_id)
        if (tables := self._tables.pop(request_id, None)) is None:
            return
        for index, kind in enumerate(self._kinds):
            if self._row:
                self._drop(request_id, tables, index, tables.entries[index])
                continue
            held = tables.entries[index] - tables.nulls[index]
            self.held_blocks -= held * len(kind.managers)

    # Prefixes ---------------------------------------------------------------------------------

    def note(self, request: Request, tokens: int, suffix: Suffix) -> None:
        """The step being scheduled computes a request up to so many tokens."""
        if not self._row or (tables := self._tables.get(request.request_id)) is None:
            return
        tables.hashes, tables.noted, tables.suffix = request.block_hashes, tokens, suffix
        self._noted.add(request.request_id)

    def show(self, request: Request, tokens: int, suffix: Suffix) -> None:
        """So many tokens of a request have been computed; let others find them at once."""
        self.note(request, tokens, suffix)
        if request.request_id in self._noted:
            self._publish_all(request.request_id)

    def step_ends(self) -> None:
        """What was noted will be computed before anything that is scheduled from now on."""
        for request_id in self._noted:
            self._publish_all(request_id)
        self._noted.clear()

    def _publish_all(self, request_id: str) -> None:
        tables = self._tables[request_id]
        for index in range(len(self._kinds)):
            self._publish(request_id, tables, index)

    def _publish(self, request_id: str, tables: _Tables, index: int) -> None:
        """Let others find what is computed of a kind."""
        kind, rows = self._kinds[index], tables.rows[index]
        per_row = self._per_row(kind)
        row = tables.nulls[index] // per_row + len(rows)
        while (key := self._shown(tables, index, row)) is not None:
            first = row * per_row
            held = [manager.req_to_blocks[request_id] for manager in kind.managers]
            blocks = [block for table in held for block in table[first : first + per_row]]
            rows.append(self._pool.publish(key, blocks))
            rows[-1].scheduled = True
            row += 1

    def covered(self, hashes: Sequence[BlockHash], suffix: Suffix) -> int:
        """With how many of these rows a request can begin: all that its next token sees is there.

        Args:
            hashes: of rows of the layers that evict, from position 0 on. suffix: the request's.
        """
        count = len(hashes)
        for index, kind in enumerate(self._kinds):
            if kind.keeps_all:
                lacks = partial(self._lacks, index, hashes, suffix)
                count = bisect_left(range(count), True, key=lacks)
        while count and (missing := self._missing(hashes, count, suffix)) is not None:
            count = missing  # whoever begins behind it, and not far behind, looks at it
        return count

    def _missing(self, hashes: Sequence[BlockHash], count: int, suffix: Suffix) -> int | None:
        """The last row in sight that a request beginning with `count` rows would miss."""
        missing = None
        for index, kind in enumerate(self._kinds):
            first = self._first_row(kind, count * self._row)
            if kind.keeps_all:
                continue
            for row in range(count - 1, max(first, missing or 0) - 1, -1):
                if self._lacks(index, hashes, suffix, row):
                    missing = row if missing is None else max(missing, row)
                    break
        return missing

    def sources(self, hashes: Sequence[BlockHash], suffix: Suffix) -> list[list[BlockHash]]:
        """Of each kind, the names of the rows that a request copies which begins with these."""
        found = []
        for index, kind in enumerate(self._kinds):
            first = self._first_row(kind, len(hashes) * self._row)
            names = [
                self._name(index, hashes[row], suffix((row + 1) * self._row))
                for row in range(first, len(hashes))
            ]
            found.append([name for name in names if name is not None])
            assert len(found[-1]) == len(names), "a row that no other request may find"
        return found

    def source_blocks(self, hashes: Sequence[BlockHash], suffix: Suffix) -> int:
        """Blocks that a request copies which begins with these rows, and that count as free."""
        idle = (
            row for names in self.sources(hashes, suffix) for row in self._pool.idle_rows(names)
        )
        return sum(len(row.blocks) for row in idle)

    def enter(
        self, request_id: str, hashes: Sequence[BlockHash], suffix: Suffix
    ) -> list[KVCacheBlockCopy]:
        """Begin a request's tables with blocks of its own; returns the copies that fill them.

        The pool must have as many free blocks beside those that are copied.
        """
        tables, copies = self._tables_of(request_id), []
        sources = self.sources(hashes, suffix)
        rows = [[self._pool.rows[name].blocks for name in names] for names in sources]
        for names in sources:
            for name in reversed(names):
                self._pool.touch_row(name)
        for index, (kind, of_kind) in enumerate(zip(self._kinds, rows, strict=True)):
            per_row = self._per_row(kind)
            entries, count = len(hashes) * per_row, len(of_kind) * per_row
            for manager in kind.managers:
                table = manager.req_to_blocks[request_id]
                assert not table, f"{request_id} has blocks already"
                table.extend([self._pool.null_block] * (entries - count))
            for place, (_, _, own) in enumerate(self._extend(request_id, kind, count)):
                start = place * per_row
                found = [block for row in of_kind for block in row[start : start + per_row]]
                pairs = zip(found, own, strict=True)
                copies += [KVCacheBlockCopy(old.block_id, new.block_id) for old, new in pairs]
            tables.entries[index], tables.nulls[index] = entries, entries - count
        return copies

    def _shown(self, tables: _Tables, index: int, row: int) -> BlockHash | None:
        """The name of one of a request's rows of a kind; None if others may not find it."""
        end, suffix = (row + 1) * self._row, tables.suffix
        place = end // self._hash - 1
        if end > tables.noted or suffix is None or place >= len(tables.hashes):
            return None
        return self._name(index, tables.hashes[place], suffix(end))

    def _lacks(self, index: int, hashes: Sequence[BlockHash], suffix: Suffix, row: int) -> bool:
        """Whether a row of a kind is not there."""
        name = self._name(index, hashes[row], suffix((row + 1) * self._row))
        return name is None or name not in self._pool.rows

    def _name(self, index: int, block_hash: BlockHash, suffix: bytes | None) -> BlockHash | None:
        """The name of a kind's row beside that of the layers that evict."""
        if suffix is None:
            return None
        return BlockHash(block_hash + b"/" + str(index).encode() + suffix)

    def _per_row(self, kind: _Kind) -> int:
        """Blocks of a row in one layer of a kind."""
        return max(self._row // kind.block_size, 1)

    def _first_row(self, kind: _Kind, tokens: int) -> int:
        """The first row that is in sight behind so many tokens."""
        return kind.skipped_tokens(tokens) // self._row

    # Bounds -----------------------------------------------------------------------------------

    def blocks_of(self, tokens: Numbers | int, in_flight: Numbers | int) -> Numbers:
        """Blocks that all these layers hold at most of requests with so many tokens, any shape.

        Args:
            in_flight: tokens that are scheduled and whose steps have not ended.
        """
        total = np.zeros(np.broadcast(tokens, in_flight).shape, np.int64)
        for kind in self._kinds:
            # What a layer sees may begin inside a block, or inside a row.
            most = -(-(kind.sees + np.asarray(in_flight, np.int64)) // kind.block_size)
            most = most + self._per_row(kind)
            needed = -(-np.asarray(tokens, np.int64) // kind.block_size)
            total += len(kind.managers) * np.minimum(needed, most)
        return total
