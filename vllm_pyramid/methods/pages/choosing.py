# SPDX-License-Identifier: Apache-2.0
"""What the kernels take of a step's rows that choose pages, and the memory they write to.

All of it is made once a step, for all layers, so that a layer makes no arrays of its own.

Shape legend: L layers, C rows that choose, G KV heads, W pages of a selected table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_pyramid.kernels.page_records import PageBatch, PageSelection
from vllm_pyramid.methods.pages.step_rows import IntArray, RowsOfStep, StepReadsPlan
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.step import Step


@dataclass(frozen=True)
class Choosing:
    """The rows of a step that choose pages, and where scores and choices go.

    Attributes:
        rows: all rows of the step's attention.
        starts: `[S + 1]` int32, where the queries of each of them begin.
        tokens: `[C]` int64, the tokens of the rows that choose; None: all of the step's.
        requests, positions: `[C]` int32.
        skips: `[L, S]` int32, of all rows. chosen_skips, budgets: `[L, C]` int32, budgets in pages.
        visible: the largest number of pages that a row sees, for each layer.
        scores: `[C, G, pages]` float32 of the current layer.
        selection: of the current layer; the next one that selects writes over it.
    """

    rows: RowsOfStep
    starts: torch.Tensor
    tokens: torch.Tensor | None
    requests: torch.Tensor
    positions: torch.Tensor
    skips: IntArray
    chosen_skips: torch.Tensor
    budgets: torch.Tensor
    visible: list[int]
    scores: torch.Tensor
    selection: PageSelection

    @classmethod
    def of(
        cls, step: Step, plan: StepReadsPlan, kv_heads: int, dense_layers: int
    ) -> Choosing | None:
        """Return the rows of a step; None if no token chooses.

        Args:
            dense_layers: number of the lowest layers, which do not select.
        """
        if not plan.chooses.any():
            return None
        rows = RowsOfStep.of(step, plan)
        chosen = rows.chosen
        skips = step.skips[:, rows.requests]
        tokens = None
        if len(rows.whole):
            tokens = torch.from_numpy(rows.starts[chosen].astype(np.int64))
        planned = plan.planned[:, plan.chooses].astype(np.int32, order="C")
        width = int(planned[dense_layers:].max())
        visible = plan.visible[:, plan.chooses].max(axis=1).tolist()
        scores = torch.empty(len(chosen), kv_heads, max(visible[dense_layers:]) - 1)
        return cls(
            rows,
            torch.from_numpy(rows.starts),
            tokens,
            torch.from_numpy(rows.requests[chosen]),
            torch.from_numpy(rows.seq_lens[chosen] - 1),
            skips,
            torch.from_numpy(np.ascontiguousarray(skips[:, chosen])),
            torch.from_numpy(planned),
            visible,
            scores,
            PageSelection.empty(len(chosen), kv_heads, width, scores.device),
        )

    def batch(self, inputs: AttentionInputs, query: torch.Tensor, block_size: int) -> PageBatch:
        """Return a layer's rows, with their queries, `[C, H, D]`."""
        return PageBatch(
            query,
            inputs.block_table,
            self.requests,
            self.positions,
            self.chosen_skips[inputs.layer],
            block_size,
            max_pages=self.visible[inputs.layer],
            key_scale=inputs.key_scale,
        )

    def tables(
        self, inputs: AttentionInputs, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tables, lengths and skips of all rows: those that read everything have their own.

        Returns:
            `[S, G, W]`, `[S]` and `[S]` int32.
        """
        selected, rows = self.selection, self.rows
        if not len(rows.whole):
            return selected.block_table, selected.seq_lens, selected.skips
        chosen, whole = torch.from_numpy(rows.chosen), torch.from_numpy(rows.whole)
        entries = -(-int(rows.seq_lens[rows.whole].max()) // block_size)
        heads, width = selected.block_table.shape[1:]
        table = selected.block_table.new_zeros((len(rows.requests), heads, max(width, entries)))
        table[chosen, :, :width] = selected.block_table
        requests = torch.from_numpy(rows.requests[rows.whole]).long()
        table[whole, :, :entries] = inputs.block_table[requests, None, :entries]
        seq_lens = torch.from_numpy(rows.seq_lens.copy())
        skips = torch.from_numpy(self.skips[inputs.layer].copy())
        seq_lens[chosen], skips[chosen] = selected.seq_lens, selected.skips
        return table, seq_lens, skips
