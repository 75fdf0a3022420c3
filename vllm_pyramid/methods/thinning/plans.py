# SPDX-License-Identifier: Apache-2.0
"""The plans of prompts that are thinned between layers: what is held of each piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import Budget, EvictionPoint, Piece, RetentionPlan
from vllm_pyramid.plan.cache import cached_by_bytes
from vllm_pyramid.policy.limits import CACHE_BYTES

if TYPE_CHECKING:
    from vllm_pyramid.methods.thinning import DecayAllocator
    from vllm_pyramid.policy.policy import Policy

Integers = npt.NDArray[np.int64]


@cached_by_bytes(CACHE_BYTES)
def piece_lengths(
    allocator: DecayAllocator,
    tokens: int,
    num_layers: int,
    share: float,
    block_size: int,
    least: int = 0,
) -> tuple[Integers, Integers]:
    """Return the tokens of a piece that the method keeps, and those held, `[num_layers]` each.

    Layers give up whole blocks of `block_size` tokens; 1 for exactly the method's number.
    """
    keep = allocator.lengths(tokens, num_layers, share, least)
    held = tokens - (tokens - keep) // block_size * block_size
    return keep, held


def thinning_plan(
    allocator: DecayAllocator,
    prompt_len: int,
    num_layers: int,
    block_size: int,
    *,
    budget: Budget,
    sinks: int,
    fill_blocks: bool,
    least: int = 0,
) -> RetentionPlan:
    """Return what each layer keeps of a prompt that is thinned piece by piece.

    Pieces end at multiples of `piece_tokens` and at the prompt's end. `budget` is a percentage.
    Always kept are the first `sinks` tokens of the prompt, and in every layer its first `least`
    ones.
    """
    assert budget.percent is not None, "the budget was not checked"
    share = float(budget.percent) / 100
    pieces = []
    keep, held = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
    for start in range(0, prompt_len, allocator.piece_tokens):
        tokens = min(allocator.piece_tokens, prompt_len - start)
        unit = block_size if fill_blocks else 1
        of_piece = piece_lengths(allocator, tokens, num_layers, share, unit, max(least - start, 0))
        pieces.append(
            Piece(
                start=start,
                end=start + tokens,
                recent=allocator.recent(tokens),
                sinks=sinks if start == 0 else 0,
                before=held.astype(np.int32),
                held=of_piece[1].astype(np.int32),
            )
        )
        keep += of_piece[0]
        held += of_piece[1]
    return RetentionPlan.of_pieces(prompt_len, block_size, keep, pieces)


@cached_by_bytes(CACHE_BYTES)
def later_point(policy: Policy, prompt: EvictionPoint, computed: int) -> EvictionPoint:
    """Return what is kept after `computed` tokens of a thinned prompt, whose own stay untouched."""
    schedule = policy.schedule
    keep = schedule.keep(prompt, computed, prompt)
    return EvictionPoint.of(
        computed,
        prompt.block_size,
        -(-int(keep.sum()) // len(keep)),
        keep,
        policy.fill_blocks,
        front=schedule.front(prompt, computed),
        recent=schedule.recent(prompt, computed),
    )
