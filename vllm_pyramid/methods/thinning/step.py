# SPDX-License-Identifier: Apache-2.0
"""Prompts that are thinned between layers (PyramidInfer): what each layer of a step sees of them.

A piece of a prompt is processed in one step. Layer l computes `enters[l]` tokens of it and keeps
`held[l]`; nothing else reaches layer l + 1. In the layer's table, in positions:

    before the step       [ dead | before ]                         ends at start
    while it runs         [ dead | before ][ enters        ]        ends at start + enters
    behind its attention  [ dead            | before ][ held  ]     ends at end

New tokens are written behind what is held of earlier pieces, so the layer's sequence is
`start + enters` long and skips `start - before`. Then everything that stays moves to the tail of
the piece, which at the prompt's end is where every other policy leaves its survivors. All of this
follows from the plan; only which tokens survive is found in the step.

Where attention reads shifted tables (`attention/shifted_tables.py`), the dead part is no part of
the table, and positions of the layer count from behind it.

Shape legend: L layers, R requests of the step, E those that are thinned in it, S of these, T_l
tokens that layer l computes, of all requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import IntArray, Piece, PlanMismatchError
from vllm_pyramid.step.step import WorkerRequest
from vllm_pyramid.step.upload import upload


@dataclass(frozen=True)
class DevicePieces:
    """S of a step's pieces where the attention is, in places of each layer's table.

    Attributes:
        rows: `[S]` int32, of the batch. recents, sinks: `[S]` int32, of `Piece`.
        enters, held, before: `[L, S]` int32, of `Piece`. contexts: `[L, S]`, what enters and is not
            recent. kept: `[L, S]`, all that stays: `before + held`.
        query_ends: `[L, S]` int32, one behind the piece's last row of the layer.
        skips, starts, lens, ends: `[L, S]` int32, where the table begins to be valid, where the new
            tokens begin, where they end, and where the piece ends, to which what stays moves.
    """

    rows: torch.Tensor
    recents: torch.Tensor
    sinks: torch.Tensor
    enters: torch.Tensor
    held: torch.Tensor
    before: torch.Tensor
    contexts: torch.Tensor
    kept: torch.Tensor
    query_ends: torch.Tensor
    skips: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    ends: torch.Tensor


@dataclass
class StepThinning:
    """The pieces of a step, and the shape of the step in every layer.

    Args:
        requests: E records. rows: `[E]` int64, their rows of the batch. pieces: E pieces.
        scheduled: `[R]` tokens of the step. computed: `[R]` tokens before it.
        step_skips: `[L, R]` int32, of requests that are past their prompt.

    Attributes:
        survivors: set by each layer's attention for the layer above: `[T_l+1]` int64, rows of layer
            l that layer l + 1 computes; None where that is all of them.
    """

    requests: list[WorkerRequest]
    rows: npt.NDArray[np.int64]
    pieces: list[Piece]
    scheduled: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    step_skips: IntArray
    survivors: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for row, piece in zip(self.rows, self.pieces, strict=True):
            if self.scheduled[row] != piece.tokens:
                raise PlanMismatchError(
                    f"a step has {self.scheduled[row]} tokens of a piece of {piece.tokens}, which "
                    "must be computed whole: scheduler and worker disagree about the KV policy; "
                    "report this"
                )
        self.starts = np.array([piece.start for piece in self.pieces], np.int32)
        self.ends = np.array([piece.end for piece in self.pieces], np.int32)
        self.recents = np.array([piece.recent for piece in self.pieces], np.int32)
        self.sinks = np.array([piece.sinks for piece in self.pieces], np.int32)
        self.before = np.stack([piece.before for piece in self.pieces], axis=1)
        self.enters = np.stack([piece.enters for piece in self.pieces], axis=1)
        self.held = np.stack([piece.held for piece in self.pieces], axis=1)
        self._starts_there: torch.Tensor | None = None
        self._slots_there: dict[bytes, torch.Tensor] = {}
        self._pieces_there: dict[bytes, DevicePieces] = {}
        self._indices_there: dict[bytes, torch.Tensor] = {}

    @cached_property
    def query_starts(self) -> IntArray:
        """Return where each request's tokens begin in a layer: `[L, R + 1]` int32."""
        lens = np.repeat(self.scheduled[None].astype(np.int32), len(self.enters), axis=0)
        lens[:, self.rows] = self.enters
        starts = np.zeros((lens.shape[0], lens.shape[1] + 1), np.int32)
        np.cumsum(lens, axis=1, out=starts[:, 1:])
        return starts

    @cached_property
    def seq_lens(self) -> IntArray:
        """Return where each request's sequence ends in a layer's table: `[L, R]` int32."""
        lens = np.repeat((self.computed + self.scheduled)[None], len(self.enters), axis=0)
        lens[:, self.rows] = self.starts + self.enters
        return lens.astype(np.int32)

    @cached_property
    def skips(self) -> IntArray:
        """Return the tokens below which a layer's table is not valid: `[L, R]` int32."""
        skips = self.step_skips.copy()
        skips[:, self.rows] = self.starts - self.before
        return skips

    def rows_below(self, layer: int, lower: int) -> npt.NDArray[np.int64]:
        """Return, for each row of a layer, the same place's row of its request in a lower one."""
        lens = np.diff(self.query_starts[layer])
        shift = self.query_starts[lower][:-1] - self.query_starts[layer][:-1]
        return np.arange(int(lens.sum())) + np.repeat(shift, lens)

    def starts_on(self, layer: int, device: torch.device) -> torch.Tensor:
        """Return `query_starts` of a layer on the device, `[R + 1]`; one copy serves all layers."""
        if self._starts_there is None:
            layers, count = self.query_starts.shape
            # Each layer's part begins at a multiple of 16 bytes, as a tensor of its own would: a
            # kernel is another one where it does not.
            padded = np.zeros((layers, -(-count // 4) * 4), np.int32)
            padded[:, :count] = self.query_starts
            self._starts_there = upload(padded, device)
        return self._starts_there[layer, : self.query_starts.shape[1]]

    def slots(self, layer: int, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Return those of a step's slots, `[>= T_0]`, that the layer writes: each piece's first."""
        key = self.query_starts[layer].tobytes()  # layers with the same tokens share the index
        if (index := self._slots_there.get(key)) is None:
            index = upload(self.rows_below(layer, 0), slot_mapping.device)
            self._slots_there[key] = index
        return slot_mapping[index]

    def index_on(self, chosen: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Return indices of pieces, `[S]`, on the device; copied once a step."""
        key = chosen.tobytes()
        if (there := self._indices_there.get(key)) is None:
            there = self._indices_there[key] = upload(chosen, device)
        return there

    def pieces_on(
        self, chosen: npt.NDArray[np.int64], device: torch.device, *, shifted: bool
    ) -> DevicePieces:
        """Return the pieces `chosen`, `[S]` indices, on the device; each set of them is copied
        once.

        `shifted`: the layers' tables begin behind the dead part.
        """
        key = chosen.tobytes()
        if (there := self._pieces_there.get(key)) is not None:
            return there
        rows, before, enters = self.rows[chosen], self.before[:, chosen], self.enters[:, chosen]
        held, recents, starts = self.held[:, chosen], self.recents[chosen], self.starts[chosen]
        first = starts - before
        origin = first if shifted else np.zeros_like(first)
        of_all = (rows, recents, self.sinks[chosen])
        of_layers = (
            *(enters, held, before, enters - recents, before + held),
            self.query_starts[:, rows] + enters,
            *(first - origin, starts - origin, starts + enters - origin),
            self.ends[chosen] - origin,
        )
        # One copy. Kernels that see these are the same wherever a row begins.
        packed = np.concatenate([np.stack(of_all), *of_layers]).astype(np.int32)
        on_device = upload(packed, device)
        sizes = [1] * len(of_all) + [len(before)] * len(of_layers)
        parts = list(on_device.split(sizes))
        there = DevicePieces(*(part[0] for part in parts[: len(of_all)]), *parts[len(of_all) :])
        self._pieces_there[key] = there
        return there


class ThinnedPositions:
    """Collects, for traces, the positions that every layer holds of a request."""

    def __init__(self) -> None:
        self._entered = torch.empty(0, dtype=torch.int32)
        self._held: dict[int, list[torch.Tensor]] = {}

    def record(self, layer: int, piece: Piece, kept: torch.Tensor) -> None:
        if layer == 0:
            self._entered = torch.arange(piece.start, piece.end, dtype=torch.int32)
            if piece.start == 0:
                self._held = {}
        self._entered = self._entered[kept.cpu().long()]
        self._held.setdefault(layer, []).append(self._entered)

    def layers(self) -> list[torch.Tensor]:
        return [torch.cat(self._held[layer]) for layer in sorted(self._held)]
