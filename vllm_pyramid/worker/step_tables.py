# SPDX-License-Identifier: Apache-2.0
"""The block tables that vLLM fills in each step and attention reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.attention.shifted_tables import HeldTables, ShiftedTables, Slots
from vllm_pyramid.step.step import Step
from vllm_pyramid.worker.worker_layers import WorkerLayers


class FrontMove(NamedTuple):
    """A request whose tables change behind an eviction.

    Each layer's table skips `before` tokens, `[L]`, until the eviction, and `skip` behind it;
    `in_place` tokens of whole blocks stand behind these.
    """

    request_id: str
    before: npt.NDArray[np.int32]
    skip: npt.NDArray[np.int32]
    in_place: int


def front_moves(step: Step) -> list[FrontMove]:
    """Return the moves that a step's evictions ask for, which hold from the next step on."""
    evictions, moves = step.evictions, list[FrontMove]()
    for index, row in enumerate([] if evictions is None else evictions.rows.tolist()):
        plan = step.requests[row].plan
        if evictions is not None and plan.in_place and plan.evicts:
            before = evictions.previous_skips[:, index]
            skip = plan.skip_after(evictions.eviction_numbers[index])
            moves.append(FrontMove(step.requests[row].request_id, before, skip, plan.in_place))
    return moves


class RunnerTables(Protocol):
    """The block tables of one of vLLM's model runners, by KV cache group.

    Attributes:
        tensors_per_group: tensors `[R_max, M]` that the runner keeps for each group.
        holds_tables: whether one of them has the tables of all requests, apart from the step's.
        held_on_host: whether that one is in host memory, of a group that evicts.
    """

    tensors_per_group: int
    holds_tables: bool

    @property
    def held_on_host(self) -> bool: ...

    def shape(self, group: int) -> tuple[int, int]:
        """Return rows and entries of the table that attention reads: `(R_max, M)`."""

    def held(self, groups: Sequence[int]) -> HeldTables | None:
        """Return the tables of all requests, where the runner holds them.

        Args:
            groups: those that evict, in the order of their layers.
        """

    def replace(self, tables: Mapping[int, torch.Tensor]) -> None:
        """Let these tensors be the runner's tables of a step.

        Where the runner holds tables of all requests, it leaves the gathering to `ShiftedTables`
        from then on; else it fills these in every step.
        """

    def move_front(
        self, request_id: str, starts: Mapping[int, tuple[int, int]], count: int
    ) -> None:
        """Move `count` entries of a request's rows to where the layers' heads end now.

        It is called between two steps. A request that has ended is left alone.

        Args:
            starts: by group, the first of these entries before and after.
        """


class StepTables:
    """Block tables of the layers that evict, shifted where attention kernels know nothing of skips.

    Attributes:
        shifted: takes the place of the runner's own tables; None where kernels know skips.

    Args:
        runner: the runner's tables.
    """

    def __init__(self, runner: RunnerTables, layers: WorkerLayers, device: torch.device) -> None:
        self.shifted: ShiftedTables | None = None
        self._runner, self._layers, self._device = runner, layers, device
        self._groups: dict[int, int] = {}
        self._layer_of: dict[int, int] = {}

    def bind(self, layer_of_group: Mapping[int, int]) -> None:
        """Take over the number of the layer of each KV cache group that evicts."""
        self._layer_of = dict(layer_of_group)

    def move_fronts(self, moves: Sequence[FrontMove], block_size: int) -> None:
        """Let what stays in place stand behind the heads that evictions gave back.

        Args:
            block_size: tokens of a block, in all layers.
        """
        for move in moves:
            old, new = move.before // block_size, move.skip // block_size
            starts = {group: (old[layer], new[layer]) for group, layer in self._layer_of.items()}
            self._runner.move_front(move.request_id, starts, move.in_place // block_size)

    def shift_in_place_of(self, groups: Mapping[int, int], max_num_tokens: int) -> ShiftedTables:
        """Replace the runner's tables by those of the layout.

        Args:
            groups: the number of the layer of each KV cache group that evicts.
            max_num_tokens: of a step.
        """
        self._groups = dict(groups)
        shapes = {layer: self._runner.shape(group) for group, layer in groups.items()}
        (rows,) = {rows for rows, _ in shapes.values()}
        block_sizes = {spec.layer_idx: spec.block_size for spec in self._layers.evicting.values()}
        self._free_runner_tables()  # before tables of the same size are allocated
        of_layers = [(shapes[layer][1], block_sizes[layer]) for layer in sorted(shapes)]
        self.shifted = self._layers.layout.device_tables(
            *(self._layers.stage, rows, max_num_tokens, of_layers, self._device),
            self._runner.held(sorted(groups, key=lambda group: groups[group])),
        )
        of_runner = self.shifted.of_runner
        self._runner.replace(
            {group: of_runner[self.shifted.place(layer)] for group, layer in groups.items()}
        )
        return self.shifted

    def release(self) -> None:
        """Free the shifted tables, so that two generations of tables never exist together."""
        if self.shifted is not None:
            self._free_runner_tables()
            self.shifted = None

    def _free_runner_tables(self) -> None:
        empty = torch.empty(0, dtype=torch.int32, device=self._device)
        self._runner.replace(dict.fromkeys(self._groups, empty))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # no part of a small cached block can serve a large tensor

    def of_layer(self, layer: int) -> torch.Tensor:
        """Return the step's block table of a layer, `[R_max, M]`, as its attention reads it."""
        assert self.shifted is not None, "only attention that reads shifted tables is asked"
        return self.shifted.tables[self.shifted.place(layer)]

    def shift(
        self,
        seq_lens: torch.Tensor,
        query_starts: torch.Tensor,
        step: Step,
        host_lens: npt.NDArray[np.int32] | None = None,
        slots: Slots | None = None,
    ) -> None:
        """Write the step's tables, where the attention kernels know nothing of skips.

        Args: as in `ShiftedTables.follow`.
        """
        if self.shifted is not None:
            self.shifted.follow(seq_lens, query_starts, step, host_lens, slots)

    def forget_step(self) -> None:
        """Forget the lengths of the last step, before graphs are captured without a step."""
        if self.shifted is not None:
            self.shifted.forget_step()
