# SPDX-License-Identifier: Apache-2.0
"""Prompts that are thinned between layers are computed piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_pyramid.plan.eviction_point import IntArray


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens `start .. end - 1` of a prompt that are computed in one step and thinned in it.

    Attributes:
        recent: the last tokens, which score the others and are kept. sinks: first ones, kept too.
        before: `[num_layers]` int32, tokens held of the pieces before it.
        held: `[num_layers]` int32, tokens of it that are held: what layer l + 1 computes is what
            layer l holds, so it never rises.
    """

    start: int
    end: int
    recent: int
    sinks: int
    before: IntArray
    held: IntArray

    @property
    def tokens(self) -> int:
        """Tokens of the piece, all of which the first layer computes."""
        return self.end - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes of memory at most, with the array that is computed when it is asked for."""
        return 600 + 3 * (128 + self.held.nbytes)

    @cached_property
    def enters(self) -> IntArray:
        """Tokens of the piece that each layer computes, `[num_layers]` int32."""
        return np.concatenate([[self.tokens], self.held[:-1]]).astype(np.int32)
