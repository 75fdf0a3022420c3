# SPDX-License-Identifier: Apache-2.0
"""Hooks of methods that keep memory of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pyramid.step.hooks.worker import WorkerHooks

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.attention_inputs import AttentionInputs


class CacheHooks(WorkerHooks):
    """Memory next to the KV cache: its size, its allocation, and what keeps it consistent.

    A pool is memory with a place for every block of the cache. What a pool holds of a block must
    follow the block: `copy_blocks` tells of every copy, `EvictionHooks.after_compact` of every
    token that moves. A block that is given to another request is not announced: `after_write` sees
    each of its tokens before any token is read.
    """

    def bytes_per_block(self) -> int:
        """Return the bytes of device memory that a pool adds to each block of the cache."""
        return 0

    def bytes_of_buffers(self) -> int:
        """Return the bytes of device memory that `allocate` takes whatever the cache's size is."""
        return 0

    def before_profile(self) -> None:
        """Prepare the model, which exists, for the step by which vLLM measures its memory."""

    def limit_cache(self, num_bytes: int) -> int:
        """Return how many of the `num_bytes` that are free the device's KV cache may take.

        ValueError: the method cannot work with a cache of that size.
        """
        return num_bytes

    def allocate(self, num_blocks: int) -> None:
        """Allocate pools for a cache of `num_blocks`, in place of those of an earlier call."""

    def value_cache(self, layer: int, key_cache: torch.Tensor) -> torch.Tensor | None:
        """Return V of a layer whose pages hold K alone, `[P, G, N, D]`; None: another keeps it.

        Called for layers whose V the policy's `values` do not keep on the device. `key_cache`, `[P,
        G, N, D]`, is the whole memory of the layer.
        """
        return None

    def compile_kernels(self, inputs: AttentionInputs) -> None:
        """Launch what the other hooks launch, so that no request waits for a compiler.

        Called once for each kind of layer and each power of two as `max_seq_len`, on devices that
        compile kernels. `inputs` are of one made-up request with one query. Its table is of block
        0, vLLM's null block, which may be written to: no request reads it.
        """

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy what pools hold of the blocks `sources` to the blocks `targets`, `[n]` int64 on the
        device.

        Called right behind every copy that the engine makes of blocks (prefixes that an eviction
        would overwrite, sessions that branch). A block may be among both: all sources are read
        before a target is written.
        """

    def block_extras(self) -> torch.Tensor | None:
        """Return the pool that goes with its blocks to the host cache and back; None: none does.

        It is `[P, ...]`, of as many bytes for each block as the part says
        (`Component.block_extras`); of any shape before `allocate`. A method with a pool that stays
        behind is refused next to a host cache.
        """
        return None
