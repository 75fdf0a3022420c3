# SPDX-License-Identifier: Apache-2.0
"""The part of a policy that says what a prompt attends to while it is computed.

Usually each token attends to all before it. A part that is sparse lets tiles of queries attend to
some tiles of keys, so the KV of the layers above depends on this part, and on the tokens up to it.
Therefore it is cached under a name of its own, and a prompt is computed in whole tiles, whose
bounds are multiples of `TILE` positions.

    positions   0 ............................ sparse_tokens(n) ........... n, the prompt's length
    attention   [ tile ][ tile ][ tile ][ tile ][ of everything
    cached      [ for requests with the same part ][ for none
"""

from __future__ import annotations

from hashlib import sha256
from typing import ClassVar, Literal

from vllm_pyramid.plan.chunk_units import NO_UNITS, ChunkUnits
from vllm_pyramid.plan.tiles import TILE
from vllm_pyramid.policy.component import Component


class Prefill(Component):
    """Base class of the section `prefill`; `skips_tiles`: prompts attend to some tiles alone."""

    section: ClassVar[str] = "prefill"
    skips_tiles: ClassVar[bool] = False

    def sparse_tokens(self, prompt_len: int) -> int:
        """Return how many first tokens of a prompt attend to chosen tiles: a multiple of `TILE`."""
        return 0

    def units(self, prompt_len: int) -> ChunkUnits:
        """Return the units of a prompt that no chunk may cut."""
        sparse = self.sparse_tokens(prompt_len)
        return ChunkUnits(sparse, TILE) if sparse else NO_UNITS

    @property
    def cache_key(self) -> bytes:
        """Return what names cached KV in addition to its tokens; empty for full attention's."""
        return b"~" + sha256(self.model_dump_json().encode()).digest() if self.skips_tiles else b""


class DensePrefill(Prefill):
    """Attend to all that comes before a token."""

    kind: Literal["all"] = "all"
