# SPDX-License-Identifier: Apache-2.0
"""What the kernels of page selection take in decode steps, at addresses that stay.

A graph of a whole decode step replays the kernels of its capture with the tensors of that moment.
So each step writes its numbers into these before the graph is replayed, and sizes are those of the
longest sequence: each row of a step is one query. A row that reads everything has the number of its
visible pages as its budget.

Shape legend: L layers, R_max requests, H query heads, G KV heads, W pages of a sequence of the
greatest length.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vllm_pyramid.methods.pages.choosing import TILE, head_requests, padded
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists
from vllm_pyramid.methods.pages.step_rows import StepReadsPlan
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload

# Rows that are scored at once: as many as vLLM captures graphs of by itself.
AT_ONCE = 512


class DecodeRows:
    """The rows of a step in which each request computes one token, and what they choose.

    Attributes:
        positions: `[L, R_max]` int32, of each row's query, counted from the first token that a
            layer's table has. budgets: `[L, R_max]` int32, pages that each row reads.
        no_skips: `[R_max]` int32, zeros.
        starts: `[R_max * G + 1]` int32, where queries begin, of rows or of their KV heads.
        scores: `[<= AT_ONCE, H, W]` float32, scratch of the current layer.
        lists: of the current layer, for R_max rows of W pages; their flags are the step's.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        heads: int,
        kv_heads: int,
        max_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._block_size, self._written = block_size, 0
        self.pages = padded(-(-max_len // block_size), TILE)
        # Each layer's part begins at a multiple of 16 bytes, or Triton compiles other kernels.
        width = padded(rows, 4)
        with torch.inference_mode(False):  # as vLLM's buffers, which outlive a step
            self._numbers = torch.zeros(2, num_layers, width, dtype=torch.int32, device=device)
            self.positions, self.budgets = self._numbers
            self.budgets.fill_(1)
            self.no_skips = torch.zeros(rows, dtype=torch.int32, device=device)
            self.starts = torch.arange(rows * kv_heads + 1, dtype=torch.int32, device=device)
            self.scores = torch.zeros(min(rows, AT_ONCE), heads, self.pages, device=device)
            self.lists = PageLists.zeros(rows, kv_heads, self.pages, device)

    @staticmethod
    def fit(step: Step) -> bool:
        return bool((step.scheduled == 1).all())

    def write(self, step: Step, plan: StepReadsPlan) -> None:
        """Write the numbers of a step of R requests; the rows behind them read one page."""
        size = self._block_size
        positions = step.computed - step.skips
        budgets = positions // size + 1
        budgets[:, plan.requests] = plan.planned  # the others are inside their prompts
        rows = positions.shape[1]
        numbers = np.zeros((2, len(positions), max(rows, self._written)), np.int32)
        numbers[1] = 1
        numbers[:, :, :rows] = positions, budgets
        self._written = rows
        self._numbers[:, :, : numbers.shape[2]].copy_(upload(numbers, self._numbers.device))
        self.lists.unranked.zero_()
        self.lists.miscounted.zero_()

    def batch(self, inputs: AttentionInputs, part: slice) -> PageBatch:
        return PageBatch(
            inputs.query[part],
            inputs.block_table,
            self.starts[part],  # row r is of request r
            self.positions[inputs.layer][part],
            self.no_skips[part],
            self._block_size,
            max_pages=self.pages + 1,
            key_scale=inputs.key_scale,
        )

    def attended(self, inputs: AttentionInputs) -> AttentionInputs:
        batch, count = inputs.batch, len(inputs.batch.seq_lens)
        chosen = self.lists.of_rows(slice(0, count))
        return replace(
            inputs,
            batch=replace(
                batch,
                query=batch.query[:count],
                block_table=chosen.block_table,
                query_start_loc=self.starts[: count + 1],
                seq_lens=chosen.seq_lens,
                skips=chosen.skips,
                max_query_len=1,
                max_seq_len=self.pages * self._block_size,
            ),
            head_requests=head_requests(inputs, chosen, self.starts),
        )
