# SPDX-License-Identifier: Apache-2.0
"""The record of recent queries and their context. Shape legend as in `kernels/records.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecentBatch:
    """The recent queries of requests, and the keys right before them (the context).

    Attributes:
        query: `[T, H, D]` queries of this step.
        query_ends: `[R]` int32; the recent queries of r are the rows `query_ends[r] - recents[r] ..
            query_ends[r] - 1` of `query`, and belong to its last tokens.
        key_cache, block_table, seq_lens, skips, key_scale: as in `AttentionBatch`; `key_scales`
            too, but not in C++.
        recents: `[R]` int32, the number of recent queries, at least 1.
        contexts: `[R]` int32, the number of keys reported, at the positions `seq_lens[r] -
            recents[r] - contexts[r] .. seq_lens[r] - recents[r] - 1`.
        max_context: max(contexts), which sets the width of the result. max_recent: max(recents).
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor
    recents: torch.Tensor
    contexts: torch.Tensor
    max_context: int | None = None
    key_scale: float = 1.0
    max_recent: int | None = None
    key_scales: torch.Tensor | None = None
