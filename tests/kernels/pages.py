# SPDX-License-Identifier: Apache-2.0
"""Batches of query tokens that choose pages, over a cache whose unused memory is poisoned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.conftest import Batch, build_batch
from vllm_pyramid.kernels.records import AttentionBatch
from vllm_pyramid.methods.pages.kernels.records import SUMMARY_ROWS, PageBatch, PageSelection


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Pages:
    """A batch whose query tokens each choose pages; its summaries are NaN until computed."""

    batch: Batch
    requests: torch.Tensor
    positions: torch.Tensor
    block_size: int

    @property
    def skips(self) -> torch.Tensor:
        return self.batch.skips[self.requests.long()]

    def rows(self, max_pages: int | None = None) -> PageBatch:
        return PageBatch(
            self.batch.query,
            self.batch.block_table,
            self.requests,
            self.positions,
            self.skips,
            self.block_size,
            max_pages,
        )

    def pool(self, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return summaries without a number: a kernel must write those that it reads."""
        blocks, heads, _, head_size = self.batch.key_cache.shape
        width = SUMMARY_ROWS[kind] * head_size
        return torch.full((blocks, heads, width), float("nan"), dtype=dtype)

    def summarise(self, module: Any, pool: torch.Tensor, kind: str, **options: Any) -> None:
        batch = self.batch
        module.summarise_pages(
            pool,
            batch.key_cache,
            batch.block_table,
            *(torch.zeros_like(batch.seq_lens), batch.seq_lens, batch.skips),
            kind=kind,
            **options,
        )

    def attention(self, selection: PageSelection | None) -> AttentionBatch:
        """Return every row as a request of one query: over its chosen pages, or its whole table."""
        rows = len(self.requests)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        caches = (self.batch.query, self.batch.key_cache, self.batch.value_cache)
        if selection is None:
            table = self.batch.block_table[self.requests.long()]
            return AttentionBatch(*caches, table, starts, self.positions + 1, self.skips)
        lists = selection.block_table
        return AttentionBatch(*caches, lists, starts, selection.seq_lens, selection.skips)


def build_pages(
    lens: list[int], query_lens: list[int], *, block_size: int = 16, **options: Any
) -> Pages:
    """Make a batch as `build_batch` does, in which every query is a row of a selection."""
    batch = build_batch(lens, query_lens, block_size=block_size, **options)
    pairs = [
        (r, n - count + i)
        for r, (n, count) in enumerate(zip(lens, query_lens, strict=True))
        for i in range(count)
    ]
    requests, positions = (
        torch.tensor(column, dtype=torch.int32) for column in zip(*pairs, strict=True)
    )
    return Pages(batch, requests, positions, block_size)
