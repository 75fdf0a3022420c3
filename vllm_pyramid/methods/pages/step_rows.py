# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a step choose pages, and how many each of them reads.

    a request of the step   [ prompt | behind it: everything is read | behind it: pages are chosen ]
    rows of its attention     one row for all of these queries          one row for each query

All of this follows from plans and computed tokens, on the host.

Shape legend: L layers, R requests of the step, T tokens of the step behind their prompts, S rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import IntArray, PlanMismatchError

if TYPE_CHECKING:
    from vllm_pyramid.step.step import Step


@dataclass(frozen=True)
class Bounds:
    """How many pages are always read, and from which position on pages are chosen.

    Attributes:
        block_size: N, tokens of a page.
        sinks, recent: pages that are always read, the query's own included.
        min_context: queries at lower positions read everything.
    """

    block_size: int
    sinks: int
    recent: int
    min_context: int


class StepReadsPlan:
    """What the tokens of a step behind their prompts are to read, and have read.

    Attributes:
        requests: `[T]` int64, each token's request. positions: `[T]` int64.
        visible: `[L, T]` int64, pages that each token sees. planned: `[L, T]` pages to be read.
        chooses: `[T]` bool, whether the token chooses in some layer.
        layers: this worker's layers; None: all.
        read: `[L, T]` pages in the tables that attention was given; 0 until a layer attends. Other
            pipeline stages compare their layers themselves, so theirs are as planned.
    """

    def __init__(
        self, step: Step, budgets: IntArray, bounds: Bounds, layers: slice | None = None
    ) -> None:
        size = bounds.block_size
        ends = step.computed.astype(np.int64) + step.scheduled
        starts = np.maximum(step.computed, step.prompt_lens).astype(np.int64)
        behind = np.maximum(ends - starts, 0)
        self.requests = np.repeat(np.arange(len(behind)), behind)
        before = np.cumsum(behind) - behind
        self.positions = starts[self.requests] + np.arange(len(self.requests))
        self.positions -= before[self.requests]
        skips = step.skips[:, self.requests].astype(np.int64)
        self.visible = self.positions // size + 1 - skips // size
        always = np.maximum(bounds.sinks, skips % size > 0) + bounds.recent
        most = np.maximum(budgets.T[:, self.requests].astype(np.int64), always)
        self.planned = np.minimum(self.visible, most)
        self.chooses = (self.planned < self.visible).any(axis=0)
        self.chooses &= self.positions >= bounds.min_context
        self.planned = np.where(self.chooses, self.planned, self.visible)
        self.layers = slice(0, len(self.planned)) if layers is None else layers
        self.read = self.planned.copy()
        self.read[self.layers] = 0

    def note_dense(self, layer: int) -> None:
        """Take note that a layer attends to everything."""
        self.read[layer] = self.visible[layer]

    def note_planned(self, layer: int) -> None:
        """Take note that the device compares the pages of a layer's tables with the plan."""
        self.read[layer] = self.planned[layer]

    def note(self, layer: int, counts: IntArray) -> None:
        """Take note of the pages that the choosing tokens' tables have in a layer."""
        if len(counts) == len(self.chooses):
            self.read[layer] = counts
            return
        self.read[layer] = self.visible[layer]
        self.read[layer, self.chooses] = counts

    def check(self, failed: npt.NDArray[np.bool_], request_ids: list[str]) -> None:
        """Raise PlanMismatchError if what was read, except by `failed`, differs from the plan."""
        wrong = (self.read != self.planned).any(axis=0) & ~failed[self.requests]
        for token in np.flatnonzero(wrong).tolist():
            raise PlanMismatchError(
                f"request {request_ids[self.requests[token]]}: the token at position "
                f"{self.positions[token]} was to read {self.planned[:, token].tolist()} pages of "
                f"the layers and read {self.read[:, token].tolist()}; report this"
            )


@dataclass(frozen=True)
class RowsOfStep:
    """The rows of attention in layers that select; all on the host.

    Attributes:
        requests: `[S]` int32, each row's request. starts: `[S + 1]` int32, where its queries begin.
        seq_lens: `[S]` int32, one behind the position of its last query.
        chosen, whole: indices of the rows that choose, with one query each, and of the others.
    """

    requests: IntArray
    starts: IntArray
    seq_lens: IntArray
    chosen: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int64]

    @classmethod
    def of(cls, step: Step, plan: StepReadsPlan) -> RowsOfStep:
        num_reqs = len(step.computed)
        choosing = np.bincount(plan.requests[plan.chooses], minlength=num_reqs)
        others = step.scheduled - choosing
        rows = (others > 0) + choosing
        requests = np.repeat(np.arange(num_reqs), rows)
        first = np.cumsum(rows) - rows
        lens = np.ones(len(requests), np.int64)
        with_others = np.flatnonzero(others > 0)
        lens[first[with_others]] = others[with_others]
        chooses = np.ones(len(requests), bool)
        chooses[first[with_others]] = False
        starts = np.concatenate([[0], np.cumsum(lens)])
        of_request = np.cumsum(step.scheduled) - step.scheduled
        seq_lens = step.computed[requests] + starts[1:] - of_request[requests]
        return cls(
            requests.astype(np.int32),
            starts.astype(np.int32),
            seq_lens.astype(np.int32),
            np.flatnonzero(chooses),
            np.flatnonzero(~chooses),
        )


@dataclass(frozen=True)
class FullPages:
    """The pages that a step fills: their summaries are made once, when the last token is there.

    Attributes:
        starts: `[R]` int32, the first position written, or `ends` where no page is filled.
        ends: `[R]` int32, one behind the last position of a full page.
        requests, pages: `[B]` int64, each page's request and number.
    """

    starts: IntArray
    ends: IntArray
    requests: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]

    @classmethod
    def of(cls, step: Step, block_size: int) -> FullPages | None:
        ends = (step.computed + step.scheduled) // block_size * block_size
        starts = np.minimum(step.computed, ends)
        first = starts // block_size
        count = ends // block_size - first
        if not count.any():
            return None
        requests = np.repeat(np.arange(len(count)), count)
        before = np.cumsum(count) - count
        pages = first[requests] + np.arange(len(requests)) - before[requests]
        return cls(starts.astype(np.int32), ends.astype(np.int32), requests, pages)
