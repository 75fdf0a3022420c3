# SPDX-License-Identifier: Apache-2.0
"""Lengths of a policy that thins prompts between layers (PyramidInfer, arXiv:2405.12532, sec. 4).

A piece of a prompt is its recent sequence, the last tokens, and its context, the tokens before. The
layers thin the context on the way up, so what a layer keeps is also all that the next one computes:

    layer 0   [ context                    | recent ]      r(0) = 1: nothing leaves
    layer 2   [ context      ]             | recent ]      keeps int(context * r(2))
    layer 4   [ context  ]                 | recent ]      keeps int(that * r(4))
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_pyramid.policy.allocators import AnyAllocator
from vllm_pyramid.policy.budget import Budget
from vllm_pyramid.policy.plans import Piece, RetentionPlan

Integers = npt.NDArray[np.int64]
_STEPS = 40  # of the bisection: finer than a token in any prompt


class DecayAllocator(AnyAllocator):
    """Each layer keeps a share of the context that reaches it; the shares fall with depth.

    The share of layer l of m is `r(l) = decay_ratio + (1 - decay_ratio) * f(l / m)`; only every
    `interval`-th layer thins. Defaults are those of the authors' repository for Llama 2 13B. The
    lengths follow from the schedule, not from a budget; a budget is an upper limit, for which the
    shares are lowered (`DecayAllocator.lengths`).

    Attributes:
        decay_curve: f falls from 1 as half a `cosine` or is `linear`.
        decay_ratio: the share towards which r(l) falls.
        interval: layers 0, interval, 2 * interval, ... thin.
        min_context: context tokens that every layer keeps, where there are so many.
        recent_ratio: the recent sequence's share of a piece.
        piece_tokens: longer prompts are thinned in pieces of so many tokens, each as a prompt of
            its own that also attends to what is left of the pieces before.
    """

    kind: Literal["decay"] = "decay"
    decay_curve: Literal["cosine", "linear"] = "cosine"
    decay_ratio: float = Field(default=0.8, ge=0, le=1)
    interval: int = Field(default=2, ge=1)
    min_context: int = Field(default=64, ge=1)
    recent_ratio: float = Field(default=0.2, gt=0, le=1)
    piece_tokens: int = Field(default=2048, ge=2)

    def recent(self, tokens: int) -> int:
        """Tokens of the recent sequence of a piece of `tokens`; at least one, its last."""
        return min(tokens, max(1, int(tokens * self.recent_ratio)))

    def contexts(self, context: int, num_layers: int, decay_ratio: float) -> Integers:
        """Context tokens that each layer keeps, `[num_layers]`, never more than the one below."""
        kept = np.empty(num_layers, np.int64)
        floor = min(context, self.min_context)
        for layer in range(num_layers):
            if layer % self.interval == 0:
                depth = layer / num_layers
                falls = (math.cos(math.pi * depth) + 1) / 2
                if self.decay_curve == "linear":
                    falls = 1 - depth
                context = max(floor, int(context * (decay_ratio + (1 - decay_ratio) * falls)))
            kept[layer] = context
        return kept

    def lengths(self, tokens: int, num_layers: int, share: float = 1.0) -> Integers:
        """Tokens that each layer keeps of a piece, its recent sequence included: `[num_layers]`.

        Args:
            tokens: of the piece. share: at most this part of `tokens * num_layers` is kept, by a
                lower decay ratio; where floor and recent sequence alone are more, they are kept.
        """
        recent = self.recent(tokens)
        kept = recent + self.contexts(tokens - recent, num_layers, self.decay_ratio)
        most = math.floor(share * tokens * num_layers)
        if int(kept.sum()) <= most:
            return kept
        low, high = 0.0, self.decay_ratio
        for _ in range(_STEPS):
            middle = (low + high) / 2
            total = recent * num_layers + self.contexts(tokens - recent, num_layers, middle).sum()
            low, high = (middle, high) if total <= most else (low, middle)
        return recent + self.contexts(tokens - recent, num_layers, low)


@lru_cache(maxsize=8192)
def piece_lengths(
    allocator: DecayAllocator, tokens: int, num_layers: int, share: float, block_size: int
) -> tuple[Integers, Integers]:
    """Of a piece: tokens the method keeps and tokens held, `[num_layers]` each.

    Args:
        block_size: each layer gives up whole blocks of this many tokens; 1 for exactly the method's
            number. What is held never rises with depth, as it is the method's number rounded up to
            the same grid in every layer.
    """
    keep = allocator.lengths(tokens, num_layers, share)
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
) -> RetentionPlan:
    """What each layer keeps of a prompt that is thinned piece by piece.

    Pieces end at multiples of `piece_tokens` and at the prompt's end, whatever else runs.

    Args:
        budget: a percentage, the upper limit. sinks: first tokens of the prompt, always kept.
    """
    assert budget.percent is not None, "the budget was not checked"
    share = float(budget.percent) / 100
    pieces = []
    keep, held = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
    for start in range(0, prompt_len, allocator.piece_tokens):
        tokens = min(allocator.piece_tokens, prompt_len - start)
        unit = block_size if fill_blocks else 1
        of_piece = piece_lengths(allocator, tokens, num_layers, share, unit)
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
