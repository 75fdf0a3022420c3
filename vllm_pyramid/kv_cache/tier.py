# SPDX-License-Identifier: Apache-2.0
"""What is below the block pool: a place for bundles that leave it, from which they come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

if TYPE_CHECKING:
    from vllm_pyramid.kv_cache.bundles import BlockBundle


class Tier:
    """Bundles by name, outside the device's pool; this class finds nothing and takes nothing.

    A lookup is followed by `pin` and `load` of what a request begins with, or by nothing.
    """

    def __contains__(self, name: BlockHash) -> bool:
        return False

    def longest_prefix(self, names: Sequence[BlockHash]) -> int:
        """Return how many of these bundles, from the first one on, are there."""
        return 0

    def must_wait(self) -> bool:
        """Return whether the next step could find more of what was looked for: it reads on."""
        return False

    def num_blocks(self, name: BlockHash) -> int:
        """Return the blocks of all layers that a bundle has which is there."""
        raise KeyError(name)

    def origin(self, name: BlockHash) -> str | None:
        """Return `BlockBundle.origin` of a bundle which is there."""
        raise KeyError(name)

    def count_query(self, tokens: int, found: int) -> None:
        """Count what a request that begins has looked for here, and what it begins with."""

    def store(self, bundle: BlockBundle) -> None:
        """Take a computed bundle whose blocks the pool gives away, and of which it has no other."""

    def idle(self, bundle: BlockBundle) -> None:
        """Take note of a bundle that no request uses any more, and the pool still has."""

    def pin(self, names: Sequence[BlockHash]) -> None:
        """Keep bundles until the step is scheduled: a request is about to load them."""

    def load(self, name: BlockHash, blocks: Sequence[KVCacheBlock]) -> None:
        """Copy a pinned bundle into blocks of the device, before the step."""

    def take_message(self) -> Any:
        """Return what the workers do before the step just scheduled; None for nothing."""

    def clear(self) -> None:
        """Forget everything."""
