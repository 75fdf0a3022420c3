# SPDX-License-Identifier: Apache-2.0
"""The last queries of requests, which come in as many steps as there are of them.

    computed tokens    ..... p - Q ............ p        p: the tokens that are scored
    a step's queries         kept, in place 0 .. Q - 1   `keep`, `copy`
    at p                     scored by, all Q            `of`

A request has a slot from the first of these queries on, the same in all layers.

Shape legend: S slots, Q queries, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pyramid.step.attention_inputs import AttentionInputs
    from vllm_pyramid.step.hooks import WorkerContext
    from vllm_pyramid.step.step import Step


@dataclass
class Copies:
    """Which queries of a step are kept, and where: the same in all layers."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    uploaded: torch.Tensor | None = None

    def add(self, source: int, target: int, count: int) -> None:
        """Add queries in a row."""
        self.sources.extend(range(source, source + count))
        self.targets.extend(range(target, target + count))


@dataclass
class _Slot:
    number: int
    point: int = 0
    held: int = 0


class RecentQueries:
    """The queries of all layers; one object a worker.

    Args:
        context: of the worker. count: Q.
        most_bytes: of all slots, at least one; None: every running request has one.
    """

    def __init__(self, context: WorkerContext, count: int, most_bytes: int | None = None) -> None:
        self.count = count
        model, config = context.config.model_config, context.config
        heads, self._device = model.get_num_attention_heads(config.parallel_config), context.device
        assert isinstance(model.dtype, torch.dtype), "vLLM replaces names such as 'auto'"
        self._dtype = model.dtype
        self._shapes = {spec.layer_idx: (heads, spec.head_size) for spec in context.specs}
        numbers = sum(heads * size for heads, size in self._shapes.values())
        self._bytes_of_slot = count * numbers * model.dtype.itemsize
        self.num_slots = config.scheduler_config.max_num_seqs
        if most_bytes is not None:
            self.num_slots = min(self.num_slots, max(most_bytes // max(self._bytes_of_slot, 1), 1))
        self._slots: dict[str, _Slot] = {}
        self._free = list(range(self.num_slots))
        self._memory: dict[int, torch.Tensor] = {}  # by layer, [S * Q, H, D]

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's memory that `allocate` takes."""
        return self.num_slots * self._bytes_of_slot

    def allocate(self) -> None:
        """Allocate the slots anew, all of them free."""
        self._memory = {}  # two generations never exist together
        rows = self.num_slots * self.count
        with torch.inference_mode(False):
            self._memory = {
                layer: torch.zeros(rows, *shape, dtype=self._dtype, device=self._device)
                for layer, shape in self._shapes.items()
            }
        self._slots, self._free = {}, list(range(self.num_slots))

    def keep(self, step: Step, row: int, point: int, copies: Copies) -> int | None:
        """Keep the queries of a request that the step has of the last ones before a point.

        Returns:
            Its slot; None if it has none, which it gets with the first of these queries if one is
            free, or if earlier ones are missing.
        """
        name, start = step.requests[row].request_id, point - self.count
        computed, end = int(step.computed[row]), int(step.computed[row] + step.scheduled[row])
        first, last = max(computed, start), min(end, point)
        slot = self._slots.get(name)
        if first == start:
            if slot is None and self._free:
                slot = self._slots[name] = _Slot(self._free.pop())
            if slot is not None:
                slot.point, slot.held = point, 0
        if slot is None or (slot.point, slot.held) != (point, first - start):
            return None
        slot.held += last - first
        source = int(step.scheduled[:row].sum()) + first - computed
        copies.add(source, slot.number * self.count + first - start, last - first)
        return slot.number

    def copy(self, inputs: AttentionInputs, copies: Copies) -> None:
        """Copy one layer's queries to their slots."""
        if not copies.sources:
            return
        memory = self._memory[inputs.layer]
        if copies.uploaded is None:
            both = np.array([copies.sources, copies.targets], np.int64)
            copies.uploaded = upload(both, memory.device)
        sources, targets = copies.uploaded
        query = inputs.query.index_select(0, sources)
        memory.index_copy_(0, targets, query.to(memory.dtype))

    def slots(self, names: Sequence[str]) -> list[int]:
        """Return the slots of requests that have come to their points.

        Raises:
            RuntimeError: some of a request's queries were not kept.
        """
        found = [self._slots.get(name) for name in names]
        for name, slot in zip(names, found, strict=True):
            if slot is None or slot.held != self.count:
                held = 0 if slot is None else slot.held
                raise RuntimeError(
                    f"request {name}: {held} queries of the {self.count} before its eviction were "
                    "kept; report this"
                )
        return [slot.number for slot in found if slot is not None]

    def of(self, layer: int, slots: Sequence[int]) -> torch.Tensor:
        """Return one layer's queries in slots, `[len(slots), Q, H, D]`."""
        memory = self.of_layer(layer).unflatten(0, (self.num_slots, self.count))
        return memory.index_select(0, upload(np.array(slots, np.int64), memory.device))

    def of_layer(self, layer: int) -> torch.Tensor:
        """Return one layer's queries in all slots, one after another: `[S * Q, H, D]`."""
        return self._memory[layer]

    def forget(self, name: str, point: int | None = None) -> None:
        """Free the slot of a request; with `point`, only if it is for the queries before that."""
        slot = self._slots.get(name)
        if slot is not None and point in (None, slot.point):
            del self._slots[name]
            self._free.append(slot.number)
