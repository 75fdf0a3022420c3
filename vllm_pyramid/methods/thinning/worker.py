# SPDX-License-Identifier: Apache-2.0
"""Chooses which tokens of a piece reach the next layer (PyramidInfer), and moves what stays.

See `step.py` for the layout and the shape legend. S are those of the step's E pieces that give
tokens up in the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.compat.thin_forward import thin_between_layers
from vllm_pyramid.methods.hooks import WorkerHooks, WorkerSide
from vllm_pyramid.methods.thinning.step import StepThinning, ThinnedPositions
from vllm_pyramid.ops.contract import RecentBatch
from vllm_pyramid.plans import Piece
from vllm_pyramid.step.call import LayerCall
from vllm_pyramid.step.step import Step, WorkerRequest
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.methods.thinning import RecentEnsembleScorer
    from vllm_pyramid.policy.base import Policy


@dataclass
class _Thinned:
    """What has been thinned of a request: tokens given up so far, over all layers; positions."""

    given: int = 0
    positions: ThinnedPositions = field(default_factory=ThinnedPositions)


class Thinner(WorkerHooks):
    """Chooses and moves survivors, layer by layer; one object for all layers of a runner."""

    name = "thinning"

    def __init__(self, policy: Policy, scorer: RecentEnsembleScorer, side: WorkerSide) -> None:
        self.distance_weight = scorer.distance_weight
        self.ranks = side.ranks
        self._policy, self._side = policy, side
        self._step: StepThinning | None = None

    def allocate(self, num_blocks: int) -> None:
        """The model exists by now: let rows leave between its layers."""
        thin_between_layers(self._side.model(), self._side.step, self._policy.name)

    def begin_step(self, step: Step) -> None:
        """The pieces of the step; a plan that has any wants each of them whole in one step."""
        self._step = None
        rows: list[int] = []
        pieces: list[Piece] = []
        for row in np.flatnonzero(step.numbers == 0).tolist():
            piece = step.requests[row].plan.piece_at(int(step.computed[row]))
            if piece is not None:
                rows.append(row)
                pieces.append(piece)
        if rows:
            self._step = step.layout = StepThinning(
                [step.requests[row] for row in rows],
                np.array(rows, np.int64),
                pieces,
                np.asarray(step.scheduled, np.int32),
                np.asarray(step.computed, np.int32),
                step.skips,
            )
            step.wants_log_sum_exp = True  # saves what follows a pass over K

    def after_attention(self, call: LayerCall) -> None:
        """Thin the step's pieces in one layer."""
        if (step := self._step) is None:
            return
        layer, device = call.layer, call.query.device
        enters, held = step.enters[layer], step.held[layer]
        width = int(held.max())
        kept = torch.arange(width, dtype=torch.int32, device=device).repeat(len(held), 1)
        dropping = np.flatnonzero(held < enters)
        if dropping.size:
            chosen = self._choose(call, step, dropping)
            kept[upload(dropping, device), : chosen.shape[1]] = chosen
        moving = np.flatnonzero((step.starts + enters < step.ends) | (held < enters))
        if moving.size:
            _move(call, step, moving, kept)
        step.survivors = None
        if dropping.size and layer + 1 < len(step.enters):
            step.survivors = _survivors(step, layer, dropping, kept)
        for index, (request, piece) in enumerate(zip(step.requests, step.pieces, strict=True)):
            thinned = _of(request)
            before = thinned.given if layer or piece.start else 0
            thinned.given = before + piece.tokens - int(held[index])
            if self.trace is not None:
                thinned.positions.record(layer, piece, kept[index, : held[index]])

    def end_step(self, step: Step) -> None:
        """Say what the prompts that end have given up, piece by piece."""
        self._step = step.layout = None
        if step.evictions is None:
            return
        for index, row in enumerate(step.evictions.rows.tolist()):
            if step.evictions.numbers[index] == 1 and step.evictions.plans[index].pieces:
                request = step.requests[row]
                step.evictions.tokens_done[index] = _of(request).given
                if self.trace is not None:
                    self.trace.place(request.request_id, _of(request).positions.layers())

    def _choose(
        self, call: LayerCall, step: StepThinning, dropping: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Rows that stay of each piece that gives some up, `[S, max(held)]` int32, ascending."""
        device, layer = call.query.device, call.layer
        rows, enters = step.rows[dropping], step.enters[layer, dropping]
        held, recents, starts = step.held[layer, dropping], step.recents[dropping], step.starts
        contexts = enters - recents
        tables = call.block_table.index_select(0, upload(rows, device))
        recent = RecentBatch(
            call.query,
            call.key_cache,
            tables,
            upload(step.query_starts[layer, rows] + enters, device),
            upload(starts[dropping] + enters, device),
            upload(starts[dropping] - step.before[layer, dropping], device),
            upload(recents, device),
            upload(contexts, device),
            max_context=int(contexts.max()),
            key_scale=call.key_scale,
            key_scales=call.key_scales,
        )
        mass = call.ops.recent_mass(
            recent,
            call.softmax,
            distance_weight=self.distance_weight,
            log_sum_exp=call.log_sum_exp,
        )
        scores = torch.full((len(rows), 1, int(enters.max())), torch.inf, device=device)
        # All ranks must let the same tokens go: what one of them keeps the others need too.
        total = self.ranks.of_the_first(self.ranks.add_up(mass.sum(dim=1)))
        column = torch.arange(total.shape[1], device=device)
        always = (column >= upload(contexts, device)[:, None]) | (
            column < upload(step.sinks[dropping], device)[:, None]
        )
        scores[:, 0, : total.shape[1]] = total.masked_fill(always, torch.inf)
        kept = call.ops.select(
            scores, upload(enters, device), upload(held, device), window=0, max_keep=int(held.max())
        )
        return kept[:, 0]


def _of(request: WorkerRequest) -> _Thinned:
    found: _Thinned = request.state.setdefault(Thinner.name, _Thinned())
    return found


def _move(
    call: LayerCall, step: StepThinning, moving: npt.NDArray[np.int64], kept: torch.Tensor
) -> None:
    """Move what stays, of this piece and of those before it, to the tail of the piece."""
    device, layer = kept.device, call.layer
    starts = upload(step.starts[moving], device)[:, None]
    before = upload(step.before[layer, moving], device)[:, None]
    keeps = step.before[layer, moving] + step.held[layer, moving]
    column = torch.arange(int(keeps.max()), dtype=torch.int32, device=device)[None]
    place = (column - before).clamp(0, kept.shape[1] - 1)
    new = starts + kept[upload(moving, device)].gather(1, place.long())
    positions = torch.where(column < before, starts - before + column, new)
    call.ops.compact(
        *call.moved,
        call.block_table.index_select(0, upload(step.rows[moving], device)),
        positions[:, None].expand(-1, call.key_cache.shape[1], -1),
        upload(step.ends[moving], device),
        upload(keeps, device),
        max_keep=int(keeps.max()),
    )


def _survivors(
    step: StepThinning, layer: int, dropping: npt.NDArray[np.int64], kept: torch.Tensor
) -> torch.Tensor:
    """Rows of layer l that layer l + 1 computes, in their order: `[T_l+1]` int64."""
    rows = upload(step.rows_below(layer + 1, layer), kept.device)
    for index in dropping:
        row, held = step.rows[index], int(step.held[layer, index])
        to = int(step.query_starts[layer + 1, row])
        rows[to : to + held] = int(step.query_starts[layer, row]) + kept[index, :held].long()
    return rows
