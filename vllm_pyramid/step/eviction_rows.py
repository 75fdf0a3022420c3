# SPDX-License-Identifier: Apache-2.0
"""Rows of several layers, whose caches are one tensor, as one batch of evictions.

    batch of a layer       a row for each request                [E, M] of the layer's table
    batch of all layers    a row for each layer and request      [L E, M] of all tables

The kernels of evictions take a cache, and a row of a block table for each request. Layers read
their blocks from one pool, so a layer's request is one more request to them.

Shape legend: S rows, L layers, E requests, Q queries of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import EvictionPoint
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import CacheHooks
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.step_evictions import StepEvictions

Indices = npt.NDArray[np.int64]


# A kernel is compiled for strides that are multiples of this, and again for others.
_ALIGNED = 16


def padded_width(width: int) -> int:
    """Return the entries of a batch's rows, of which the first `width` are those of a table."""
    return -(-width // _ALIGNED) * _ALIGNED


class JoinedTables:
    """The block tables of some layers, as one: `table` `[K, M]` int32. It is not to be written to.

    Rows may overlap: tables that are parts of one tensor are read where they are; others are
    copied.
    """

    def __init__(self, calls: Sequence[AttentionInputs]) -> None:
        tables = [call.block_table for call in calls]
        first = min(tables, key=lambda table: table.storage_offset())
        address = first.untyped_storage().data_ptr()
        parts = {(t.untyped_storage().data_ptr(), t.stride(), t.shape[1]) for t in tables}
        if len(tables) == 1:
            self.table, self._starts, self._step = first, np.zeros(1, np.int64), 1
        elif len(parts) == 1 and address and first.stride(1) == 1:
            begins = [table.storage_offset() - first.storage_offset() for table in tables]
            pitch = math.gcd(*begins, first.stride(0)) or 1
            self._starts = np.array(begins) // pitch
            self._step = first.stride(0) // pitch
            ends = self._starts + (np.array([len(table) for table in tables]) - 1) * self._step
            rows = int(ends.max()) + 1
            size, strides = (rows, first.shape[1]), (pitch, 1)
            self.table = first.as_strided(size, strides, first.storage_offset())
        else:
            self._starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
            self._step = 1
            self.table = torch.cat(tables)

    def rows(self, places: Indices, rows: Indices) -> Indices:
        """Return where rows are: row `rows[i]` of the table at `places[i]`."""
        return self._starts[places] + rows * self._step


def batch_of_layers(
    evictions: StepEvictions,
    calls: Sequence[AttentionInputs],
    joined: JoinedTables,
    policy: Policy,
    places: Indices,
    shortened: Indices,
    query_ends: Indices,
    num_queries: int,
) -> EvictionBatch:
    """Return requests in several layers, whose caches are one tensor, as one batch.

    Args:
        calls: of the layers. The first one's query is that of all. joined: their tables.
        places: `[S]`, the layer of each row, as an index into `calls`.
        shortened: `[S]` indices of requests. query_ends: `[S]`, of `calls[0].query`.
        num_queries: of each request there.
    """
    call, device = calls[0], calls[0].key_cache.device
    layers = np.array([one.layer for one in calls], np.int64)[places]
    first_blocks, lens, dead = evictions.held(layers, shortened)
    keeps = evictions.kept_lens[layers, shortened]
    rows = joined.rows(places, evictions.rows[shortened])
    # Each row of the upload begins at a multiple of 16 bytes.
    packed = np.zeros((5, -(-len(rows) // 4) * 4), np.int32)
    packed[:, : len(rows)] = lens, dead, keeps, query_ends, rows
    on_device = upload(packed, device)[:, : len(rows)]
    width = joined.table.shape[1]
    if call.shifted or not first_blocks.any():
        used = min(-(-int(lens.max()) // call.key_cache.shape[2]), width)
        tables = joined.table.new_empty(len(rows), padded_width(used))
        torch.index_select(joined.table[:, :used], 0, on_device[4], out=tables[:, :used])
    else:
        columns = upload(first_blocks[:, None] + np.arange(width), device).clamp_(max=width - 1)
        tables = joined.table.index_select(0, on_device[4]).gather(1, columns.long())
    return EvictionBatch(
        call,
        policy,
        evictions,
        shortened,
        layers,
        tables,
        query_ends=on_device[3],
        lens=on_device[0],
        dead_prefixes=on_device[1],
        keeps=on_device[2],
        host_lens=lens,
        host_dead_prefixes=dead,
        host_keeps=keeps,
        host_query_ends=query_ends.astype(np.int32),
        num_queries=num_queries,
    )


def copy_overwritten(
    evictions: StepEvictions,
    calls: Sequence[AttentionInputs],
    indices: Iterable[int],
    pools: Sequence[CacheHooks] = (),
    joined: JoinedTables | None = None,
) -> None:
    """Copy the blocks of layers, whose caches are one tensor, that evictions will overwrite.

    Where a layer keeps everything, these are all its blocks: the request goes on with them.

    Args:
        calls: of the layers. indices: of requests.
        pools: of methods, which follow their blocks. joined: the tables, if the caller has them.
    """
    if not any(evictions.copies):
        return
    places, rows, columns, targets = [], [], [], []
    for index in indices:
        blocks, plan = evictions.copies[index], evictions.plans[index]
        if not blocks:
            continue
        if not isinstance(plan, EvictionPoint) or evictions.eviction_numbers[index] != 1:
            raise RuntimeError(
                f"request {evictions.request_ids[index]}: blocks are to be copied before eviction "
                f"{evictions.eviction_numbers[index]}, and only the first one's can be; report this"
            )
        starts = np.concatenate([[0], np.cumsum(plan.blocks_behind)])
        end = plan.computed // plan.block_size
        for place, call in enumerate(calls):
            count = int(plan.blocks_behind[call.layer])
            places.append(np.full(count, place))
            rows.append(np.full(count, evictions.rows[index]))
            columns.append(np.arange(end - count, end))
            targets.append(blocks[starts[call.layer] : starts[call.layer] + count])
    if not places or not sum(map(len, places)):
        return
    joined = joined or JoinedTables(calls)
    found = joined.rows(np.concatenate(places), np.concatenate(rows))
    packed = np.stack([found, np.concatenate(columns), np.concatenate(targets)])
    row, column, target = upload(packed.astype(np.int64), calls[0].key_cache.device)
    source = joined.table[row, column]
    calls[0].ops.copy_blocks(*calls[0].moved, source, target)
    for pool in pools:
        pool.copy_blocks(source.long(), target)


def without_query(call: AttentionInputs) -> AttentionInputs:
    """Return a layer's inputs to keep until other layers have attended.

    A view of the queries would keep them all: of all layers they are as large as the cache.
    """
    nothing = call.query.new_empty(0, *call.query.shape[1:])
    return replace(call, batch=replace(call.batch, query=nothing), log_sum_exp=None)
