# SPDX-License-Identifier: Apache-2.0
"""How many blocks the evicting layers need: one number of table entries answers for all of them.

tokens                  0      16      32      48      64
K and V on the device   [  0  ][  1  ][  2  ][  3  ]        4 entries
K alone                 [     0      ][     1      ]        half as many, rounded up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv

from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout
from vllm_pyramid.plan import Plan, peak_blocks

Numbers = npt.NDArray[np.int64]


class LayerBlocks:
    """Block counts of the tables of evicting layers (`layout.py`).

    Args:
        stock_block_sizes: tokens of a block in each group of vLLM's own, which grow in lockstep,
            too.
        full_block_size: tokens of a block that holds K and V.

    Attributes:
        block_sizes: `[tables]` int64, tokens of a block.
        unit: tokens of the smallest block; entries of tables are counted in units.
        largest: tokens of the largest block: its multiples end blocks in all tables.
        ratios: `[tables]` units in a block.

    Raises:
        ValueError: the block sizes are not multiples of the smallest.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        stages: PipelineLayout,
        full_block_size: int,
        stock_block_sizes: Sequence[int] = (),
    ) -> None:
        self.stages = stages
        self.block_sizes = np.repeat(np.array(block_sizes, np.int64), stages.tables_per_layer)
        self.full_block_size = full_block_size
        self.unit = min([*block_sizes, *stock_block_sizes])
        self.largest = max(block_sizes)
        if any(size % self.unit for size in (*block_sizes, *stock_block_sizes)):
            raise ValueError(
                f"this model has layers with blocks of {list(block_sizes)} tokens, and others of "
                f"{list(stock_block_sizes)}, which cannot run in lockstep: serve it with "
                "--kv-policy none"
            )
        self.ratios = self.block_sizes // self.unit
        self._period = lcm(*self.ratios.tolist())
        self._grown = lru_cache(maxsize=256)(self._grow)
        # Count tables by block-size ratio, per pipeline stage.
        self._tables_by_ratio = [
            list(Counter(self.ratios[start:end].tolist()).items())
            for start, end in zip(stages.starts, stages.ends, strict=True)
        ]

    @property
    def num_tables(self) -> int:
        """Return the number of tables of all evicting layers."""
        return len(self.block_sizes)

    def missing(self, have: int, need: int) -> list[int]:
        """Return the blocks per stage that extend tables from `have` to `need` units."""
        return [
            sum(tables * (cdiv(need, ratio) - cdiv(have, ratio)) for ratio, tables in by_ratio)
            for by_ratio in self._tables_by_ratio
        ]

    def growth(self, have: int, need: int) -> tuple[Numbers, list[int]]:
        """Return `[tables]` blocks that extend tables from `have` to `need` units, and `[layers]`
        sums.

        The sums go up to and with each layer: all tables of a layer are in one of vLLM's, where any
        new block is as good. Not to be written to.
        """
        start = have % self._period
        return self._grown(start, start + need - have)

    def _grow(self, have: int, need: int) -> tuple[Numbers, list[int]]:
        missing = self.of_units(need) - self.of_units(have)
        per_layer = self.stages.tables_per_layer
        return missing, missing.cumsum()[per_layer - 1 :: per_layer].tolist()

    def of_units(self, units: int) -> Numbers:
        """Return the entries of each table, `[tables]`, for `units`."""
        entries: Numbers = -(-units // self.ratios)
        return entries

    def most(self, plan: Plan, num_tokens: int, late: int = 0, *, evicted: bool = False) -> Numbers:
        """Return the most blocks per stage of a request until `num_tokens` (`peak_blocks`)."""
        shortened = plan.inner or plan.every or num_tokens > plan.prompt_len
        if not shortened or num_tokens < plan.prompt_len:
            return self.stages.sums(-(-num_tokens // self.block_sizes))
        by_table = peak_blocks(
            plan, num_tokens, self.block_sizes, late, self.stages.sizes, evicted=evicted
        )
        return self.stages.sums(by_table)

    def whole(self, tokens: Numbers, stage: int = 0) -> Numbers:
        """Return the blocks of a stage for tokens of which none is evicted, in `tokens`' shape."""
        units = -(-tokens // self.unit)
        total = np.zeros_like(units)
        for ratio, tables in self._tables_by_ratio[stage]:
            total += tables * -(-units // ratio)
        return total

    def full(self, num_tokens: int) -> int:
        """Return the blocks of all tables with nothing evicted and V on the device."""
        return self.num_tables * cdiv(num_tokens, self.full_block_size)
