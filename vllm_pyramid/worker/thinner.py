# SPDX-License-Identifier: Apache-2.0
"""Chooses which tokens of a piece reach the next layer (PyramidInfer), and moves what stays.

See `thinning.py` for the layout and the shape legend. S are those of the step's E pieces that give
tokens up in the layer.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.scorers import RecentEnsembleScorer
from vllm_pyramid.worker.solve import OneRank, Ranks
from vllm_pyramid.worker.thinning import StepThinning, ThinnedPositions
from vllm_pyramid.worker.upload import upload


class Thinner:
    """Chooses and moves survivors, layer by layer; one object for all layers of a runner.

    Args:
        policy: with a `thinner`. ranks: that share the heads; None for one.
    """

    def __init__(self, policy: Policy, ranks: Ranks | None = None) -> None:
        assert isinstance(policy.scorer, RecentEnsembleScorer)
        self.distance_weight = policy.scorer.distance_weight
        self.ranks = ranks or OneRank()
        self.positions: ThinnedPositions | None = None  # set where a trace is written

    def thin_layer(
        self,
        ops: ModuleType,
        step: StepThinning,
        layer: int,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        *,
        scale: float,
        soft_cap: float,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """Thin the step's pieces in one layer, behind its attention.

        Args:
            ops: a module with the functions of `ops/reference.py`. query: `[T_l, H, D]`.
            key_cache: `[P, G, N, D]`. value_cache: same. block_table: `[>= R, M]` int32.
            log_sum_exp: `[T_l, H]`, what the attention of the step found; None: found again.
        """
        enters, held = step.enters[layer], step.held[layer]
        width = int(held.max())
        kept = torch.arange(width, dtype=torch.int32, device=query.device).repeat(len(held), 1)
        dropping = np.flatnonzero(held < enters)
        if dropping.size:
            chosen = self._choose(
                ops, step, layer, dropping, query, key_cache, block_table,
                scale=scale, soft_cap=soft_cap, log_sum_exp=log_sum_exp,
            )  # fmt: skip
            kept[upload(dropping, query.device), : chosen.shape[1]] = chosen
        moving = np.flatnonzero((step.starts + enters < step.ends) | (held < enters))
        if moving.size:
            _move(ops, step, layer, moving, kept, key_cache, value_cache, block_table)
        step.survivors = None
        if dropping.size and layer + 1 < len(step.enters):
            step.survivors = _survivors(step, layer, dropping, kept)
        for index, (name, piece) in enumerate(zip(step.request_ids, step.pieces, strict=True)):
            before = step.given.get(name, 0) if layer or piece.start else 0
            step.given[name] = before + piece.tokens - int(held[index])
            if self.positions is not None:
                self.positions.record(name, layer, piece, kept[index, : held[index]])

    def _choose(
        self,
        ops: ModuleType,
        step: StepThinning,
        layer: int,
        dropping: npt.NDArray[np.int64],
        query: torch.Tensor,
        key_cache: torch.Tensor,
        block_table: torch.Tensor,
        *,
        scale: float,
        soft_cap: float,
        log_sum_exp: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows that stay of each piece that gives some up, `[S, max(held)]` int32, ascending."""
        device = query.device
        rows, enters = step.rows[dropping], step.enters[layer, dropping]
        held, recents, starts = step.held[layer, dropping], step.recents[dropping], step.starts
        contexts = enters - recents
        tables = block_table.index_select(0, upload(rows, device))
        mass = ops.recent_mass(
            query,
            key_cache,
            tables,
            upload(step.query_starts[layer, rows] + enters, device),
            upload(starts[dropping] + enters, device),
            upload(starts[dropping] - step.before[layer, dropping], device),
            upload(recents, device),
            upload(contexts, device),
            scale=scale,
            distance_weight=self.distance_weight,
            soft_cap=soft_cap,
            log_sum_exp=log_sum_exp,
            max_context=int(contexts.max()),
        )
        scores = torch.full((len(rows), 1, int(enters.max())), torch.inf, device=device)
        # All ranks must let the same tokens go: what one of them keeps the others need too.
        total = self.ranks.of_the_first(self.ranks.add_up(mass.sum(dim=1)))
        column = torch.arange(total.shape[1], device=device)
        always = (column >= upload(contexts, device)[:, None]) | (
            column < upload(step.sinks[dropping], device)[:, None]
        )
        scores[:, 0, : total.shape[1]] = total.masked_fill(always, torch.inf)
        kept: torch.Tensor = ops.select(
            scores, upload(enters, device), upload(held, device), window=0, max_keep=int(held.max())
        )
        return kept[:, 0]


def _move(
    ops: ModuleType,
    step: StepThinning,
    layer: int,
    moving: npt.NDArray[np.int64],
    kept: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Move what stays, of this piece and of those before it, to the tail of the piece."""
    device = kept.device
    starts = upload(step.starts[moving], device)[:, None]
    before = upload(step.before[layer, moving], device)[:, None]
    keeps = step.before[layer, moving] + step.held[layer, moving]
    column = torch.arange(int(keeps.max()), dtype=torch.int32, device=device)[None]
    place = (column - before).clamp(0, kept.shape[1] - 1)
    new = starts + kept[upload(moving, device)].gather(1, place.long())
    positions = torch.where(column < before, starts - before + column, new)
    ops.compact(
        key_cache,
        value_cache,
        block_table.index_select(0, upload(step.rows[moving], device)),
        positions[:, None].expand(-1, key_cache.shape[1], -1),
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
