# SPDX-License-Identifier: Apache-2.0
"""The blocks of requests that are ordered to evict (`LevelPlan`).

    before   [ bundles, shared with others ][ bundles, its own ][ own ]
    ordered  [ bundles                     ][ own, survivors at the end of the prompt    ]
    after    [ null                                    ][ own, survivors and the answer  ]

Until a request is ordered, all its blocks may be shared, as in vLLM. An order gives up the bundles
that the survivors are written to; the others leave when the worker has reported.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.plan import EvictionPoint, RetentionPlan


class OrderedBlocks:
    """What orders do to the tables of a coordinator's requests."""

    def __init__(self, coordinator: LockstepCoordinator) -> None:
        self._coordinator = coordinator
        self._sizes = coordinator.layer_blocks.block_sizes

    def lacks(self, request: Request, num_tokens: int) -> bool:
        """Return whether the pool has too few blocks for `num_tokens` tokens of a request."""
        coordinator = self._coordinator
        needed = coordinator.get_num_blocks_to_allocate(request.request_id, num_tokens)
        return needed > coordinator.block_pool.get_num_free_blocks()

    def freed_by(self, request_id: str, point: EvictionPoint) -> npt.NDArray[np.int64] | None:
        """Count the blocks that become free if a request is evicted to a level, `[layers]`.

        None if the survivors would go to blocks that other requests have.
        """
        prefixes = self._coordinator.prefixes
        bundles = prefixes.of(request_id).bundles[prefixes.cache]
        shared = len(bundles)  # with others: the first ones
        while shared and bundles[shared - 1].refs == 1:
            shared -= 1
        if shared * prefixes.cache.tokens > point.skip.min():
            return None
        now = self._coordinator.plans.confirmed(request_id)
        freed: npt.NDArray[np.int64] = point.skip // self._sizes - shared * prefixes.cache.blocks
        return freed if now is None else freed - now.end.skip // self._sizes

    def order(self, request_id: str, plan: RetentionPlan) -> list[list[int]]:
        """Let a request evict before the step being scheduled, to the last point of a plan.

        Called before the stores take note of the step. Returns `[layers][blocks]` ids of the blocks
        that hold what is left of its prompt.
        """
        prefixes, plans = self._coordinator.prefixes, self._coordinator.plans
        point, now = plan.end, plans.confirmed(request_id)
        prefixes.claim(request_id, int(point.skip.min()) // prefixes.cache.tokens)
        firsts = self._sizes * 0 if now is None else now.end.skip // self._sizes
        ends = -(-point.computed // self._sizes)
        plans.order(request_id, plan)
        return [
            [block.block_id for block in table[first:end]]
            for table, first, end in zip(
                plans.records[request_id].tables, firsts.tolist(), ends.tolist(), strict=True
            )
        ]

    def release(self, request: Request) -> None:
        """Give the head of a request back, whose eviction the worker has just reported."""
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        self._coordinator.remove_skipped_blocks(request.request_id, processed)
