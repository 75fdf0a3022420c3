# SPDX-License-Identifier: Apache-2.0
"""The size of a model's KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pyramid.frontend.layer_kinds import FULL, SLIDING, STATE

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# For each cache type: bytes of a number, and of the scale of one token and KV head.
CACHE_BYTES = {
    **{name: (size, 0) for name, size in DTYPE_BYTES.items()},
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), (1, 0)),
    **dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), (1, 4)),
}


@dataclass(frozen=True)
class OtherLayers:
    """Layers of one kind that do not evict.

    Attributes:
        kind: `SLIDING`, `CHUNKED`, `STATE`, or `FULL` for a draft model's. layers: how many.
        sees: tokens of a window or chunk.
        token_bytes: bytes of K and V of a token in one layer; 0 for a state, whose size only vLLM
            knows.
    """

    kind: str
    layers: int
    sees: int = 0
    token_bytes: int = 0

    def tokens(self, length: int, block_size: int) -> int:
        """Return the tokens of the blocks that a layer holds while it decodes token `length`."""
        if self.kind == FULL:
            return -(-length // block_size) * block_size
        # A window may begin inside a block; so may a chunk that is not made of whole blocks.
        inside = self.kind == SLIDING or self.sees % block_size > 0
        bound = -(-self.sees // block_size) + inside
        return min(-(-length // block_size), bound) * block_size


@dataclass(frozen=True)
class CacheShape:
    """The numbers from which the size of a model's KV cache follows.

    Attributes:
        num_layers: layers with full attention. num_kv_heads: KV heads of each.
        head_size: elements of a head. dtype: type of K and V, one of `CACHE_BYTES`.
        layers: the model's own numbers of these layers; empty: from 0 on.
        other_layers: other layers with a cache. readers: layers that read another layer's cache.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    layers: tuple[int, ...] = ()
    other_layers: tuple[OtherLayers, ...] = ()
    readers: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of K and V of one block of one layer."""
        return 2 * block_size * self.num_kv_heads * row_bytes(self.head_size, self.dtype)

    @property
    def has_states(self) -> bool:
        """Whether layers have states, whose size only vLLM knows."""
        return any(kind.kind == STATE for kind in self.other_layers)

    def page_bytes(self, block_size: int) -> int:
        """Return the bytes of a page of the pool, which all layers share: those of the largest."""
        largest = max((kind.token_bytes for kind in self.other_layers), default=0)
        return max(self.block_bytes(block_size), block_size * largest)

    def tokens_of_block(self, block_size: int, token_bytes: int | None = None) -> int:
        """Return the tokens of a layer's block: vLLM fills a page with tokens, or else pads it.

        Args:
            token_bytes: bytes of a token in the layer; None for a layer that evicts.
        """
        own = self.block_bytes(block_size) if token_bytes is None else block_size * token_bytes
        page = self.page_bytes(block_size)
        return block_size if page % own else block_size * (page // own)


def row_bytes(head_size: int, dtype: str) -> int:
    """Return the bytes of K, or of V, of one token and KV head; `dtype` is one of `CACHE_BYTES`."""
    number, scale = CACHE_BYTES[dtype]
    return head_size * number + scale
