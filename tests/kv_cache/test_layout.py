# SPDX-License-Identifier: Apache-2.0
"""Layouts: which of vLLM's entries are a table's, by hand and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kv_cache.test_coordinator import BLOCK_SIZE, coordinator_of
from tests.scheduler.harness import kv_cache_config
from vllm_pyramid.kv_cache.cache_store import RequestTerms
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator

TABLES, HEADS, BLOCKS = 6, 3, 4


def with_a_request(tables_per_layer: int) -> LockstepCoordinator:
    """A request of `BLOCKS` blocks in each of `TABLES` tables."""
    config = kv_cache_config(TABLES, HEADS * BLOCK_SIZE, 200, lanes=tables_per_layer)
    coordinator = coordinator_of(config, HEADS * BLOCK_SIZE)
    coordinator.plans.add("r", RequestTerms(None))
    coordinator.allocate_new_blocks("r", *[BLOCKS * HEADS * BLOCK_SIZE] * 2)
    return coordinator


def ids(table: Any) -> list[int]:
    return [block.block_id for block in table]


@pytest.mark.parametrize("tables_per_layer", [1, HEADS])
def test_heads_go_back_and_null_blocks_keep_their_places(tables_per_layer: int) -> None:
    coordinator = with_a_request(tables_per_layer)
    layout, pool = coordinator.layout, coordinator.block_pool
    before, free = [ids(table) for table in layout.tables("r")], pool.get_num_free_blocks()
    given = np.array([0, 2, 1, 4, 3, 0])
    assert layout.release_heads("r", given).tolist() == given.tolist()
    assert layout.release_heads("r", given).tolist() == [0] * TABLES  # they had gone before
    assert pool.get_num_free_blocks() == free + given.sum()
    null = pool.null_block.block_id
    expected = [[null] * count + table[count:] for table, count in zip(before, given, strict=True)]
    assert [ids(table) for table in layout.tables("r")] == expected
    assert layout.blocks_held("r") == (BLOCKS - given).tolist()
    assert layout.blocks_held("nobody") == [0] * TABLES
    layout.clear("r", 5, 1, 3)
    assert ids(layout.tables("r")[5]) == [before[5][0], null, null, before[5][3]]
    layout.clear("r", 5, 3, 1)  # no entry is between these
    assert ids(layout.tables("r")[5]) == [before[5][0], null, null, before[5][3]]


def test_reports_are_of_layers() -> None:
    layers, heads = with_a_request(1).layout, with_a_request(HEADS).layout
    numbers = np.array([5, 0, 3, 1, 1, 2])
    assert layers.sums(numbers) == layers.means(numbers) == numbers.tolist()
    assert (heads.sums(numbers), heads.means(numbers)) == ([8, 4], [2, 1])
    assert (layers.report(), heads.report()) == ({}, {"kv_heads": HEADS})
