# SPDX-License-Identifier: Apache-2.0
"""What a lookup finds of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash

from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.plan import RetentionPlan


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
