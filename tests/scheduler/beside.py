# SPDX-License-Identifier: Apache-2.0
"""Layers that do not evict, beside those that do: their specs, and what a worker does with them.

A layer with a window or in chunks reads back what it wrote, as far as it sees; a state is read and
written in place; a draft model's layer looks at everything. Cells are tagged as in `harness.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

FIRST_LAYER = 200  # in tags


@dataclass(frozen=True)
class Beside:
    """One layer that does not evict.

    Attributes:
        sees: tokens of the window or of a chunk. block_size: of a state the longest sequence.
    """

    kind: Literal["sliding", "chunked", "state", "draft"]
    sees: int = 0
    block_size: int = 4

    @property
    def spec(self) -> KVCacheSpec:
        if self.kind == "state":
            return MambaSpec(block_size=self.block_size, shapes=((8,),), dtypes=(torch.float32,))
        if self.kind == "draft":
            return FullAttentionSpec(
                block_size=self.block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
            )
        if self.kind == "sliding":
            return SlidingWindowSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=8,
                dtype=torch.float32,
                sliding_window=self.sees,
            )
        return ChunkedLocalAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.float32,
            attention_chunk_size=self.sees,
        )

    def most_blocks(self, longest: int, in_flight: int) -> int:
        """Blocks of a request at most."""
        if self.kind == "state":
            return 1
        if self.kind == "draft":
            return cdiv(longest, self.block_size)
        return cdiv(min(self.sees + in_flight, longest), self.block_size) + 1

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` looks at."""
        if self.kind == "draft":
            return 0
        if self.kind == "sliding":
            return max(position - self.sees + 1, 0)
        return position // self.sees * self.sees


def seen(layer: Beside, table: Sequence[int], start: int, end: int) -> tuple[np.ndarray, ...]:
    """Positions that the token at `start` and those up to `end` look at: places, and their cells.

    Raises:
        AssertionError: one of them has no block.
    """
    positions = np.arange(layer.first_seen(start), end)
    blocks = np.array(table)[positions // layer.block_size]
    assert (blocks > 0).all(), "the null block is nobody's"
    return positions, blocks, positions % layer.block_size


def compute(
    layers: Sequence[Beside],
    tables: Sequence[Sequence[int]],
    memory_PN: np.ndarray,
    cells: np.ndarray,
    request_tag: int,
    layer_bits: int,
    start: int,
    end: int,
) -> None:
    """One request's step in these layers: write tokens `start .. end - 1`, and look at the past.

    Args:
        cells: `[layers, positions]` tags that each position should hold; written here.

    Raises:
        AssertionError: what is looked at is not there any more.
    """
    for index, (layer, table) in enumerate(zip(layers, tables, strict=True)):
        tag = request_tag + ((FIRST_LAYER + index) << layer_bits)
        if layer.kind == "state":
            assert len(table) == 1 and table[0] > 0
            assert not start or memory_PN[table[0], 0] == cells[index, 0], "a state was overwritten"
            memory_PN[table[0], 0] = cells[index, 0] = tag + end
            continue
        cells[index, start:end] = tag + np.arange(start, end)
        positions, *places = seen(layer, table, start, end)
        new = positions >= start
        memory_PN[places[0][new], places[1][new]] = cells[index, start:end]
        assert (memory_PN[places[0], places[1]] == cells[index, positions]).all(), (
            f"{layer}: something in sight was overwritten"
        )
