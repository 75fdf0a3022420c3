# SPDX-License-Identifier: Apache-2.0
"""Tiles of a prompt that is computed sparsely, and chunks that cut none of them."""

from __future__ import annotations

TILE = 128  # positions of a tile; tile i begins at position `i * TILE`


def whole_tiles(computed: int, tokens: int, sparse_tokens: int) -> int:
    """Return the tokens of a chunk that is cut to whole tiles, at most `tokens`.

    Args:
        computed: tokens before the chunk; a multiple of `TILE` if below `sparse_tokens`.
        sparse_tokens: see `Prefill.sparse_tokens`.
    """
    end = computed + tokens
    return tokens if end >= sparse_tokens else max(end // TILE * TILE - computed, 0)
