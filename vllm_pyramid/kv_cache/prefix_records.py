# SPDX-License-Identifier: Apache-2.0
"""What the store of prefixes knows of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash

from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix that a request could begin with, of `tokens` tokens.

    `names` are of the bundles on the device, from position 0 on; the request would share the first
    `shared` of them and copy the others. `below` are in the tier below the pool, behind these.
    """

    names: list[BlockHash]
    shared: int
    below: list[BlockHash]
    tokens: int

    @property
    def shared_names(self) -> Sequence[BlockHash]:
        """Return the names of those that it would share."""
        return self.names[: self.shared]


@dataclass(slots=True)
class SharedPrefix:
    """The part of a request's tables that others may have, too.

    Attributes:
        bundles: by their kind, the bundles with which its tables begin, until an eviction gives
            them back, or to its end.
        from_below: first and last token, exclusive, that it began with out of the tier below.
    """

    bundles: dict[PrefixCache, list[BlockBundle]]
    from_below: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, kinds: Iterable[PrefixCache]) -> SharedPrefix:
        """Return what a request has before it begins: nothing, of each kind."""
        return cls({kind: [] for kind in kinds})
