# SPDX-License-Identifier: Apache-2.0
"""The host's half of the KV cache: V of every page of which the device holds K alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_pyramid.step.hooks import HostMemory


class HostPool:
    """One region of host memory, `num_pages` pages of `page_bytes`, for all layers of a worker.

    Host page b holds V of the tokens whose K is in device page b, in the same order. Pages of
    layers that keep V on the device leave theirs unused.
    """

    def __init__(
        self, num_pages: int, page_bytes: int, make: Callable[[int], HostMemory] = HostMemory
    ) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._memory = make(num_pages * page_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def release(self) -> None:
        self._memory.release()

    def values(self, key_cache: torch.Tensor) -> torch.Tensor:
        """Return V of a layer in host memory, dense, shaped as the device pool's `key_cache`."""
        pages, heads, tokens, size = key_cache.shape
        page_bytes = heads * tokens * size * key_cache.element_size()
        if (pages, page_bytes) != (self.num_pages, self.page_bytes):
            raise RuntimeError(
                f"the device's cache has {pages} pages of {page_bytes} bytes of K, the host's "
                f"memory {self.num_pages} of {self.page_bytes}: V would lie elsewhere; report this"
            )
        return self._memory.bytes.view(key_cache.dtype).view(pages, heads, tokens, size)
