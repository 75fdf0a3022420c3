# SPDX-License-Identifier: Apache-2.0
"""Recount the blocks of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_pyramid.kv_cache.bundles import BlockBundle, BundlePool
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.shared_blocks import Holder


def host_of(coordinator: LockstepCoordinator) -> HostCache | None:
    """The host cache below the pool; None without one."""
    tier = coordinator.block_pool.tier
    return tier if isinstance(tier, HostCache) else None


def check_host(coordinator: LockstepCoordinator) -> None:
    """Every slot of the host cache is free or one entry's, and none is kept for a step.

    Raises:
        AssertionError: a slot is lost, pinned, or counted twice.
    """
    host = host_of(coordinator)
    if host is None:
        return
    chunks = host._table._manager._policy.chunks
    keys = {key for entry in host._entries.values() for key in host._keys(entry)}
    assert keys <= set(chunks), "an entry without a slot"
    assert len(chunks) == host.used_slots <= host.num_slots
    slots = [chunk.chunk_id for chunk in chunks.values()]
    assert len(set(slots)) == len(slots) and all(0 <= slot < host.num_slots for slot in slots)
    assert all(chunk.ref_cnt == 0 for chunk in chunks.values()), "pinned between steps"
    assert not host._pinned and not host._copies.stored and not host._copies.loaded
    # Parts whose bundle has lost another part stay until they are the oldest.
    lost = set(chunks) - keys
    assert all(key[:-4].rpartition(b"#")[1] for key in lost), "a slot of no entry"
    assert host._names == {entry.stem: name for name, entry in host._entries.items()}


def check_pool(coordinator: LockstepCoordinator) -> None:
    """Every block is free, one request's, or one row's; and the counters say so.

    Raises:
        AssertionError: free + held differ from the pool, a block has two owners, a row's references
            are miscounted, or a counter disagrees with the block lists.
    """
    check_host(coordinator)
    pool, prefixes = coordinator.block_pool, coordinator.prefixes.cache
    kinds = coordinator.prefixes.kinds
    pools = getattr(pool, "pools", [pool])  # of the pipeline stages
    held, private = np.zeros(coordinator.layer_blocks.num_tables, np.int64), []
    refs: Counter[int] = Counter()
    holders: dict[PrefixCache, dict[int, set[Holder]]] = {cache: {} for cache in kinds}
    in_use: dict[PrefixCache, dict[int, BlockBundle]] = {cache: {} for cache in kinds}
    for request_id, record in coordinator.plans.records.items():
        own = coordinator.prefixes.of(request_id)
        of_kinds = list(own.bundles.items())
        plan = record.resolved or record.plan
        in_place = 0 if plan is None else plan.in_place // prefixes.tokens
        skip = plan.skip_after(record.released) if record.released else None
        if record.released:
            assert len(own.bundles[prefixes]) <= in_place, "rows after the head was given back"
        assert record.released or len({len(rows) for _, rows in of_kinds}) == 1
        for cache, rows_of_kind in of_kinds:
            refs.update(map(id, rows_of_kind))
            for index, row in enumerate(rows_of_kind):
                holder = Holder(request_id, index < in_place)
                holders[cache].setdefault(id(row), set()).add(holder)
            in_use[cache].update({id(row): row for row in rows_of_kind})
        for layer in range(coordinator.layer_blocks.num_tables):
            per_layer = coordinator.layer_blocks.stages.tables_per_layer
            number, lane = divmod(layer, per_layer)
            manager = coordinator.layer_managers[number]
            table = manager.req_to_blocks.get(request_id, [])[lane::per_layer]
            assert manager.block_size == coordinator.layer_blocks.block_sizes[layer]
            assert len(table) == cdiv(
                record.num_blocks, int(coordinator.layer_blocks.ratios[layer])
            )
            (cache, rows_of_layer) = next(kind for kind in of_kinds if kind[0].blocks[layer])
            count, start = int(cache.blocks[layer]), int(cache.blocks[:layer].sum())
            head = 0 if skip is None else int(skip[layer]) // manager.block_size
            head *= bool(in_place)
            for index, row in enumerate(rows_of_layer):
                of_layer, at = row.blocks[start : start + count], head + index * count
                assert table[at : at + count] == list(of_layer)
            stage = coordinator.layer_blocks.stages.of_table(layer)
            end = head + len(rows_of_layer) * count
            alone = [b for b in [*table[:head], *table[end:]] if not b.is_null]
            assert all(pools[stage].blocks[b.block_id] is b for b in alone), "another stage's"
            ids = [(stage, b.block_id) for b in alone]
            held[layer] += len(ids)
            private.extend(ids)
    held += sum(len(rows_of_kind) * cache.blocks for cache, rows_of_kind in in_use.items())
    used = {key: row for rows_of_kind in in_use.values() for key, row in rows_of_kind.items()}
    stock_groups = coordinator.stock_groups
    of_companions = [
        row
        for group in stock_groups.groups
        for table in group.tables.values()
        for row in table.bundles
    ]
    refs.update(map(id, of_companions))
    used.update({id(row): row for row in of_companions})
    beside = [
        (0, block.block_id)
        for manager in coordinator.single_type_managers
        if manager not in coordinator.layer_managers
        for table in manager.req_to_blocks.values()
        for block in table
        if not block.is_null
    ]
    assert len(beside) == stock_groups.held_blocks
    found = {(0, block.block_id) for row in of_companions for block in row.blocks}
    assert found <= set(beside), "a row of a companion is in no table"
    private += set(beside) - found
    owners = {name for m in coordinator.single_type_managers for name in m.req_to_blocks}
    assert owners <= set(coordinator.plans.records), "blocks of no request"
    assert (held == coordinator.counters.held_blocks).all(), (
        held,
        coordinator.counters.held_blocks,
    )

    aside = [row for row in pool.idle if row.hash is None]
    stores, sessions = coordinator.prefixes, coordinator.sessions
    of_stores = (stores._of_request, stores.evicted.pending, sessions._resumed, sessions._to_save)
    for kept in of_stores:
        assert set(kept) <= set(coordinator.plans.records), "a store keeps a request that is gone"
    left = [pending.reserved for pending in stores.evicted.pending.values()]
    assert {*map(id, aside)} <= {*map(id, left)}, "set aside for nobody"
    rows = {id(row): row for row in (*pool.bundles.values(), *used.values())}
    of_requests = {key: names for of_kind in holders.values() for key, names in of_kind.items()}
    for row in rows.values():
        assert row.refs == refs[id(row)], "references are miscounted"
        is_known = pool.bundles[row.hash] is row
        assert is_known != (row in pool.duplicates.get(row.hash, ())), (
            "a row is known, or a duplicate"
        )
        assert (row in pool.idle) == (not row.refs), "idle rows are those without references"
        assert row.holders == of_requests.get(id(row), set()), (
            f"a row has holders {row.holders}, and no request among them has it"
        )
    for cache in kinds:
        assert cache.holders.counts == Counter(map(frozenset, holders[cache].values()))
    assert sum(map(len, pool.duplicates.values())) == len(rows) - len(pool.bundles)
    assert all(pool.duplicates.values()), "an empty list of duplicates"
    of_rows = [
        (_stage_of(block, pools), block.block_id)
        for row in (*rows.values(), *aside)
        for block in row.blocks
    ]
    for row in (*rows.values(), *aside):
        counts = Counter(_stage_of(block, pools) for block in row.blocks)
        assert not row.counts or row.counts == tuple(counts[s] for s in range(len(pools)))
        assert row.counts or len(pools) == 1

    free = [
        (stage, block.block_id)
        for stage, own in enumerate(pools)
        for block in own.free_block_queue.get_all_free_blocks()
    ]
    everything = [*free, *private, *of_rows]
    assert len(everything) == len(set(everything)), "a block belongs to two places"
    # The null block is nobody's.
    assert len(everything) == len(pools) * (pool.num_gpu_blocks - 1), "a block is lost"
    of_stages = Counter(stage for stage, _ in free)
    of_stages.update(_stage_of(block, pools) for row in pool.idle for block in row.blocks)
    assert pool.free_by_stage().tolist() == [of_stages[s] for s in range(len(pools))]
    assert pool.get_num_free_blocks() == min(of_stages[s] for s in range(len(pools)))
    assert (coordinator.usable_blocks == pool.num_gpu_blocks - 1).all()
    assert all(pools[stage].blocks[index].ref_cnt == 0 for stage, index in free)
    for stage, index in (*private, *of_rows):
        assert pools[stage].blocks[index].ref_cnt == 1


def _stage_of(block: KVCacheBlock, pools: Sequence[BundlePool]) -> int:
    """The stage to whose pool a block belongs."""
    (stage,) = (s for s, pool in enumerate(pools) if pool.blocks[block.block_id] is block)
    return stage
