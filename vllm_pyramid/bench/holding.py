# SPDX-License-Identifier: Apache-2.0
"""How much room requests that decode will take, from what they hold now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Holding", "steps_left", "to_their_end"]


@dataclass(frozen=True)
class Holding:
    """What a request holds of a pool.

    Attributes:
        blocks: now. tokens: that have a place in them or had one. left: tokens by which it will
            still grow, at most; where it evicts on the way, until it has done so.
        block_sizes: tokens of a block, of every block table of its own.
    """

    blocks: int
    tokens: int
    left: int
    block_sizes: tuple[int, ...]

    @classmethod
    def of(cls, scheduler: Any, request: Any) -> Holding:
        """Of a running request of vLLM's scheduler."""
        manager = scheduler.kv_cache_manager
        tables = manager.get_blocks(request.request_id).blocks
        sizes = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_config.kv_cache_groups]
        # The newest token has no place before the next step, and the last one never gets one.
        end = request.num_prompt_tokens + request.max_tokens - 1
        left = end - request.num_computed_tokens
        coordinator = getattr(scheduler, "coordinator", None)
        plan = coordinator and coordinator.confirmed_plan(request.request_id)
        if plan is not None and plan.every:
            left = min(left, plan.every)
        blocks = sum(not block.is_null for table in tables for block in table)
        return cls(blocks, request.num_computed_tokens, max(left, 0), tuple(sizes))

    def after(self, steps: int) -> int:
        """Blocks that it holds after so many further tokens."""
        tokens = self.tokens + min(steps, self.left)
        return self.blocks + sum(
            -(-tokens // size) - -(-self.tokens // size) for size in self.block_sizes
        )


def to_their_end(running: Sequence[Holding], blocks: int) -> int:
    """How many of the requests a pool of `blocks` holds when they are all as long as they get.

    So many finish with none thrown out, whatever the order; of more, the last may have to go.
    """
    used = count = 0
    for ending in sorted(holding.after(holding.left) for holding in running):
        used += ending
        if used > blocks:
            break
        count += 1
    return count


def steps_left(running: Sequence[Holding], free: int, longest: int) -> int:
    """Decode steps of all the requests for which `free` blocks are enough, at most `longest`."""
    now = sum(holding.blocks for holding in running)
    for steps in range(1, longest + 1):
        if sum(holding.after(steps) for holding in running) - now > free:
            return steps - 1
    return longest
