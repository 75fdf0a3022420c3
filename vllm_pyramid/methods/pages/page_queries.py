# SPDX-License-Identifier: Apache-2.0
"""The mean queries of pages, for scorers that choose keys by what the page's own tokens ask for.

A page may be filled in several steps, and the cache does not hold queries. Those of each request's
last page are kept here until it is full. Prompts that are found in the cache begin at a page, so
the queries of a page are always computed by one request.

Shape legend: R requests, B pages that the step fills, N tokens of a page, G KV heads, H query
heads, D head size, L layers of this worker, E places for requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages.step_rows import FullPages
    from vllm_pyramid.step.attention_inputs import AttentionInputs
    from vllm_pyramid.step.step import Step


class PageQueries:
    """The queries of pages that are not full, of all layers; means over a KV head's query heads.

    `tails` is `[E, L, N, G, D]` float32, one place a request that has been in a step.
    """

    def __init__(self, layers: slice, kv_heads: int, block_size: int, head_size: int) -> None:
        self._first_layer = layers.start
        self._shape = layers.stop - layers.start, block_size, kv_heads, head_size
        self.tails = torch.zeros(0, *self._shape)
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        # Of the step: a filled page's tokens in the batch, and whether the batch has them,
        # `[B, N]`; then its request's place, `[B]`.
        self._tokens = torch.zeros(0, 0, dtype=torch.int64)
        self._is_new = torch.zeros(0, 0, dtype=torch.bool)
        self._of_pages = torch.zeros(0, dtype=torch.int64)
        # Tokens of the pages that stay open: in the batch, and where they are kept.
        self._open = torch.zeros(3, 0, dtype=torch.int64)

    def bytes_of(self, requests: int) -> int:
        """Return the bytes that a number of running requests take."""
        return 4 * requests * int(np.prod(self._shape))

    def begin_step(self, step: Step, filled: FullPages | None) -> None:
        """Find which queries of the step belong to which page."""
        size = self._shape[1]
        places = np.array([self._place(request.request_id) for request in step.requests])
        computed, scheduled = step.computed.astype(np.int64), step.scheduled.astype(np.int64)
        first = np.cumsum(scheduled) - scheduled
        if filled is not None:
            positions = filled.pages[:, None] * size + np.arange(size)
            behind = positions - computed[filled.requests, None]
            self._is_new = torch.from_numpy(behind >= 0)
            tokens = np.maximum(first[filled.requests, None] + behind, 0)
            self._tokens = torch.from_numpy(tokens)
            self._of_pages = torch.from_numpy(places[filled.requests])
        ends = computed + scheduled
        begins = np.maximum(computed, ends // size * size)
        count = ends - begins
        requests = np.repeat(np.arange(len(count)), count)
        before = np.cumsum(count) - count
        positions = begins[requests] + np.arange(len(requests)) - before[requests]
        tokens = first[requests] + positions - computed[requests]
        self._open = torch.from_numpy(np.stack([tokens, places[requests], positions % size]))

    def _place(self, request_id: str) -> int:
        if (place := self._places.get(request_id)) is not None:
            return place
        if not self._free:
            count = len(self.tails)
            more = torch.zeros(max(count, 8), *self._shape)
            self.tails = torch.cat([self.tails, more])
            self._free = list(range(count, len(self.tails)))
        return self._places.setdefault(request_id, self._free.pop())

    def forget(self, request_id: str) -> None:
        """Give a request's place to another one."""
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place)

    def take(self, inputs: AttentionInputs, *, fills: bool) -> torch.Tensor | None:
        """Keep the queries of pages that stay open, and return the means of those that are full.

        They are `[B, G, D]` float32 in the order of `FullPages`; None if the step fills none.
        """
        _, size, heads, width = self._shape
        layer = inputs.layer - self._first_layer
        query = inputs.query.float().unflatten(1, (heads, -1)).mean(dim=2)
        means = None
        if fills:
            kept = self.tails[self._of_pages, layer]
            new = query[self._tokens.clamp(max=len(query) - 1)]
            means = torch.where(self._is_new[..., None, None], new, kept).sum(dim=1) / size
        tokens, places, rows = self._open
        self.tails[places, layer, rows] = query[tokens]
        assert means is None or means.shape[1:] == (heads, width)
        return means
