# SPDX-License-Identifier: Apache-2.0
"""Chooses which tokens of a piece reach the next layer (PyramidInfer), and moves what stays.

Layout and shape legend as in `step.py`. S of the step's pieces give tokens up in the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.compat.thin_forward import thin_between_layers
from vllm_pyramid.methods.thinning.kernels import RecentBatch, recent_ops
from vllm_pyramid.methods.thinning.step import StepThinning, ThinnedPositions
from vllm_pyramid.plan import IntArray, Piece
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.failures import SCORES, Failure
from vllm_pyramid.step.hooks import CacheHooks, LayerHooks, StepHooks, StepNeeds, WorkerContext
from vllm_pyramid.step.step import Step, WorkerRequest
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.methods.thinning import DecayAllocator, RecentEnsembleScorer
    from vllm_pyramid.policy.policy import Policy


# No constant of a kernel follows from a number of columns beyond this.
LONGEST_KIND = 4096
# What choosing and moving keep of a token, in four bytes each: scores, who stays, where it was,
# where it goes, some of them as int64.
_NUMBERS_OF_A_TOKEN = 24


@dataclass
class _Thinned:
    """What has been thinned of a request: tokens given up, and positions for a trace."""

    given: int = 0
    positions: ThinnedPositions = field(default_factory=ThinnedPositions)


class Thinner(CacheHooks, StepHooks, LayerHooks):
    """Chooses and moves survivors, layer by layer; one object for all layers of a worker."""

    name = "thinning"
    asks_ranks: ClassVar[bool] = True

    def __init__(
        self,
        policy: Policy,
        scorer: RecentEnsembleScorer,
        allocator: DecayAllocator,
        context: WorkerContext,
    ) -> None:
        self.distance_weight = scorer.distance_weight
        self._tokens = allocator.piece_tokens
        # Pieces of fewer tokens than that give up none.
        self._least = allocator.min_context + context.block_size
        self.ranks = context.ranks
        self._policy, self._context = policy, context
        self._step: StepThinning | None = None

    def before_profile(self) -> None:
        """Let vLLM measure a step that thins, too: it takes other memory than a compiled one."""
        thin_between_layers(
            self._context.model(), self._context.step, self._policy.name, is_profiled=True
        )

    def allocate(self, num_blocks: int) -> None:
        """Let rows leave between the layers of the model, which exists by now."""
        thin_between_layers(self._context.model(), self._context.step, self._policy.name)

    def bytes_of_buffers(self) -> int:
        """Return the bytes for scores of one layer, and for what is chosen by them."""
        config, piece = self._context.config, self._tokens
        tokens = config.scheduler_config.max_num_batched_tokens
        rows = config.scheduler_config.max_num_seqs
        # As many pieces as find room, each of them as wide as the longest.
        pieces = min(rows, max(tokens // self._least, 1))
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        kv_heads, size = self._context.specs[0].num_kv_heads, self._context.block_size
        entries = -(-config.model_config.max_model_len // size)
        of_scores = 4 * pieces * min(piece, tokens) * (kv_heads + _NUMBERS_OF_A_TOKEN)
        return of_scores + 2 * 4 * pieces * entries + (4 * heads + 4 * 8) * tokens

    def compile_kernels(self, inputs: AttentionInputs) -> None:
        """Launch the kernels, except `compact`, for two tokens and scores of the asked width."""
        assert inputs.batch.max_seq_len is not None
        device, width = inputs.query.device, min(inputs.batch.max_seq_len, LONGEST_KIND)
        one = torch.ones(1, dtype=torch.int32, device=device)
        recent = RecentBatch(
            *(
                inputs.query[:1],
                inputs.key_cache,
                inputs.block_table,
                one,
                2 * one,
                0 * one,
                one,
                one,
            ),
            max_context=width,
            max_recent=1,
            key_scale=inputs.key_scale,
            key_scales=inputs.key_scales,
        )
        mass = recent_ops(inputs.ops).recent_mass(
            recent, inputs.softmax, distance_weight=self.distance_weight
        )
        scores = mass.sum(dim=1, keepdim=True)
        inputs.ops.select(scores, one, one, window=0, max_keep=1)

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: IntArray) -> bool:
        """Return whether a piece is in the step: a graph computes all tokens in all layers."""
        return any(
            request.plan.pieces and done < request.initial.prompt_len
            for request, done in zip(requests, computed.tolist(), strict=True)
        )

    def begin_step(self, step: Step) -> StepNeeds | None:
        self._step = None
        rows: list[int] = []
        pieces: list[Piece] = []
        for row in np.flatnonzero(step.eviction_numbers == 0).tolist():
            piece = step.requests[row].plan.piece_at(int(step.computed[row]))
            if piece is not None:
                rows.append(row)
                pieces.append(piece)
        if not rows:
            return None
        self._step = StepThinning(
            [step.requests[row] for row in rows],
            np.array(rows, np.int64),
            pieces,
            np.asarray(step.scheduled, np.int32),
            np.asarray(step.computed, np.int32),
            step.skips,
        )
        # The log-sum-exp saves what follows a pass over K.
        return StepNeeds(wants_log_sum_exp=True, layout=self._step)

    def after_attention(self, inputs: AttentionInputs) -> None:
        if (step := self._step) is None:
            return
        layer, device = inputs.layer, inputs.query.device
        enters, held = step.enters[layer], step.held[layer]
        dropping = np.flatnonzero(held < enters)
        moving = np.flatnonzero((step.starts + enters < step.ends) | (held < enters))
        step.survivors = None
        kept = None
        if moving.size or self.trace is not None:
            width = int(held.max())
            kept = torch.arange(width, dtype=torch.int32, device=device).repeat(len(held), 1)
            if dropping.size:
                chosen = self._choose(inputs, step, dropping)
                kept[step.index_on(dropping, device), : chosen.shape[1]] = chosen
        if moving.size:
            assert kept is not None
            _move(inputs, step, moving, kept)
            if dropping.size and layer + 1 < len(step.enters):
                step.survivors = _survivors(step, layer, dropping, kept)
        for index, (request, piece) in enumerate(zip(step.requests, step.pieces, strict=True)):
            thinned = _of(request)
            before = thinned.given if layer or piece.start else 0
            thinned.given = before + piece.tokens - int(held[index])
            if self.trace is not None:
                assert kept is not None
                thinned.positions.record(layer, piece, kept[index, : held[index]])

    def end_step(self, step: Step) -> None:
        self._step = None
        evictions = step.evictions
        if evictions is None:
            return
        for index, row in enumerate(evictions.rows.tolist()):
            if evictions.eviction_numbers[index] == 1 and evictions.plans[index].in_pieces:
                request = step.requests[row]
                evictions.tokens_done[index] = _of(request).given
                if self.trace is not None:
                    self.trace.place(request.request_id, _of(request).positions.layers())

    def _choose(
        self, inputs: AttentionInputs, step: StepThinning, dropping: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the rows that stay of each thinned piece, `[S, max(held)]` int32, ascending."""
        device, layer = inputs.query.device, inputs.layer
        enters = step.enters[layer, dropping]
        pieces = step.pieces_on(dropping, device, shifted=inputs.shifted)
        recent = RecentBatch(
            inputs.query,
            inputs.key_cache,
            inputs.block_table.index_select(0, pieces.rows),
            pieces.query_ends[layer],
            pieces.lens[layer],
            pieces.skips[layer],
            pieces.recents,
            pieces.contexts[layer],
            max_context=int((enters - step.recents[dropping]).max()),
            max_recent=int(step.recents[dropping].max()),
            key_scale=inputs.key_scale,
            key_scales=inputs.key_scales,
        )
        mass = recent_ops(inputs.ops).recent_mass(
            recent,
            inputs.softmax,
            distance_weight=self.distance_weight,
            log_sum_exp=inputs.log_sum_exp,
        )
        scores = torch.full((len(enters), 1, int(enters.max())), torch.inf, device=device)
        # All ranks must let the same tokens go: what one of them keeps the others need too.
        total = self.ranks.broadcast(self.ranks.all_reduce(mass.sum(dim=1)))
        column = torch.arange(total.shape[1], device=device)
        always = (column >= pieces.contexts[layer][:, None]) | (column < pieces.sinks[:, None])
        # All ranks have the same numbers here, so all find the same requests wrong.
        wrong = (~(total < torch.inf) & ~always).any(dim=1)
        reason = f"layer {layer}: attention of recent queries is NaN or infinite: no rank follows"
        names = [step.requests[index].request_id for index in dropping.tolist()]
        self._context.step().failures.flag(Failure(SCORES, reason), names, wrong)
        total = total.masked_fill(wrong[:, None], 0.0)
        scores[:, 0, : total.shape[1]] = total.masked_fill(always, torch.inf)
        kept = inputs.ops.select(
            scores,
            pieces.enters[layer],
            pieces.held[layer],
            window=0,
            max_keep=int(step.held[layer, dropping].max()),
        )
        return kept[:, 0]


def _of(request: WorkerRequest) -> _Thinned:
    found: _Thinned = request.state.setdefault(Thinner.name, _Thinned())
    return found


def _move(
    inputs: AttentionInputs, step: StepThinning, moving: npt.NDArray[np.int64], kept: torch.Tensor
) -> None:
    """Move what stays, of this piece and of those before it, to the tail of the piece."""
    device, layer = kept.device, inputs.layer
    pieces = step.pieces_on(moving, device, shifted=inputs.shifted)
    starts, before = pieces.starts[layer][:, None], pieces.before[layer][:, None]
    most = int((step.before[layer, moving] + step.held[layer, moving]).max())
    column = torch.arange(most, dtype=torch.int32, device=device)[None]
    place = (column - before).clamp(0, kept.shape[1] - 1)
    new = starts + kept[step.index_on(moving, device)].gather(1, place.long())
    positions = torch.where(column < before, starts - before + column, new)
    inputs.ops.compact(
        *inputs.moved,
        inputs.block_table.index_select(0, pieces.rows),
        positions[:, None].expand(-1, inputs.key_cache.shape[1], -1),
        pieces.ends[layer],
        pieces.kept[layer],
        max_keep=most,
    )


def _survivors(
    step: StepThinning, layer: int, dropping: npt.NDArray[np.int64], kept: torch.Tensor
) -> torch.Tensor:
    """Return the rows of layer l that layer l + 1 computes, in their order: `[T_l+1]` int64."""
    device, own, above = kept.device, step.query_starts[layer], step.query_starts[layer + 1]
    count = int(own[-1])
    sources = step.rows_below(layer + 1, layer)
    for index in dropping.tolist():
        row, held = step.rows[index], int(step.held[layer, index])
        to = int(above[row])
        sources[to : to + held] = count + index * kept.shape[1] + np.arange(held)
    starts = upload(np.ascontiguousarray(own[step.rows]), device)
    rows = torch.arange(count, device=device)
    chosen = (starts[:, None] + kept).flatten().long()
    return torch.cat([rows, chosen]).index_select(0, upload(sources, device))
