# SPDX-License-Identifier: Apache-2.0
"""The size of the tiles of a prompt that is computed sparsely."""

from __future__ import annotations

TILE = 128  # positions of a tile; tile i begins at position `i * TILE`
