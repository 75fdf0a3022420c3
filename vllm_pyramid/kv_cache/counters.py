# SPDX-License-Identifier: Apache-2.0
"""What the coordinator and its parts count."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(slots=True)
class CacheCounters:
    """Counters over all requests; arrays are `[tables]` int64 (`layout.py`).

    Attributes:
        skipped_tokens: tokens given back by requests that still hold blocks.
        blocks_freed: blocks given back by evictions since the start; a shared block counts for each
            request that gives it back.
        tokens_evicted: tokens evicted since the start, counted when the worker confirms: a request
            that ends at that moment gives all its blocks back at once.
        num_releases: how often blocks went back: by an eviction, an end or a preemption.
    """

    num_tables: int
    held_blocks: Numbers = field(init=False)
    skipped_tokens: Numbers = field(init=False)
    blocks_freed: Numbers = field(init=False)
    tokens_evicted: Numbers = field(init=False)
    num_evictions: int = 0
    num_releases: int = 0

    def __post_init__(self) -> None:
        self.held_blocks = np.zeros(self.num_tables, np.int64)
        self.skipped_tokens = np.zeros(self.num_tables, np.int64)
        self.blocks_freed = np.zeros(self.num_tables, np.int64)
        self.tokens_evicted = np.zeros(self.num_tables, np.int64)
