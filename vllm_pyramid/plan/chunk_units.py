# SPDX-License-Identifier: Apache-2.0
"""Leading tokens of a prompt that are computed in whole units, so that no chunk cuts one."""

from __future__ import annotations

from typing import NamedTuple


class ChunkUnits(NamedTuple):
    """Units of a prompt's first `tokens`, a multiple of `size`: unit i begins at `i * size`."""

    tokens: int = 0
    size: int = 1

    def chunk(self, computed: int, tokens: int) -> int:
        """Return the tokens, at most `tokens`, of a chunk that cuts no unit, behind whole units."""
        end = computed + tokens
        return tokens if end >= self.tokens else max(end // self.size * self.size - computed, 0)

    def whole(self, tokens: int) -> int:
        """Return how many of the first `tokens` tokens are whole units."""
        return tokens // self.size * self.size if self.tokens else tokens


NO_UNITS = ChunkUnits()  # chunks may end anywhere
