# SPDX-License-Identifier: Apache-2.0
"""What a layer's metadata builder and attention share: given to both by the model runner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from vllm_pyramid.attention.evict import evict_layer
from vllm_pyramid.attention.shifted_tables import ShiftedTables
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs, ValueWrite
from vllm_pyramid.step.hooks import WorkerHooks
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace import TraceWriter


class StepSource(Protocol):
    """Where the layers of a worker find the policy and the current step.

    Attributes:
        policy: the served policy. step: the step that runs now. num_layers: L.
    """

    policy: Policy
    step: Step
    num_layers: int


@dataclass
class LayerContext:
    """One attention layer's place in the policy.

    Attributes:
        retention: the runner's, shared by all layers. layer: index of this one, from the bottom.
        hooks: of the methods at work, shared by all layers.
        ranks: that share the KV heads; None for one.
        rotary: of this layer; None where it has none.
        trace: where kept positions go, or None; set when the worker's warm-up is over.
        shifted: short tables of all layers, on devices whose kernels need them.
        values: V of a layer whose pages hold K alone, `[P, G, N, D]`; None: beside K.
        has_readers: whether layers above attend to this one's cache; it evicts after the last.
    """

    tracker: StepSource
    layer: int
    hooks: list[WorkerHooks] = field(default_factory=list)
    ranks: Ranks | None = None
    rotary: Rotary | None = None
    trace: TraceWriter | None = None
    shifted: ShiftedTables | None = None
    values: torch.Tensor | None = None
    has_readers: bool = False
    _attended: AttentionInputs | None = None

    @property
    def step(self) -> Step:
        """The current one."""
        return self.tracker.step

    def slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Of the step's slots those that this layer writes."""
        layout = self.step.layout
        return slot_mapping if layout is None else layout.slots(self.layer, slot_mapping)

    def write_values(self, ops: Ops, values: torch.Tensor, slots: torch.Tensor, **own: Any) -> None:
        """V of the layer's new tokens goes where a method keeps it; `own`: of `ValueWrite`."""
        write = ValueWrite(ops, self.layer, values, slots=slots, **own)
        for hooks in self.hooks:
            hooks.write_values(write)

    def after_write(self, slots: torch.Tensor) -> None:
        """The layer's new tokens have been written."""
        for hooks in self.hooks:
            hooks.after_write(self.layer, slots)

    def attend(self, call: AttentionInputs, out: torch.Tensor) -> bool:
        """Let a method attend in place of the layer's attention; whether one did."""
        return any(hooks.attend(call, out) for hooks in self.hooks)

    def after_attention(self, call: AttentionInputs) -> None:
        """The layer has attended: gather and evict as the policy and the step ask."""
        for hooks in self.hooks:
            hooks.after_attention(call)
        if self.step.evictions is None:
            return
        if self.has_readers:
            # The layers in between may use the memory of these queries again.
            batch = replace(call.batch, query=call.query.clone())
            self._attended = replace(call, batch=batch)
        else:
            self.evict(call, self.step.evictions)

    def after_last_reader(self) -> None:
        """The last layer that reads this one's cache has attended."""
        if self.step.evictions is not None:
            assert self._attended is not None
            self.evict(self._attended, self.step.evictions)
        self._attended = None

    def evict(self, call: AttentionInputs, evictions: StepEvictions) -> None:
        """Evict in this layer, what methods add included."""
        evict_layer(self.tracker.policy, call, evictions, self.hooks, self.trace)
        for hooks in self.hooks:
            hooks.after_eviction(call, evictions)


@dataclass
class ReaderContext:
    """The place of a layer that reads another's cache: nothing is gathered from it or evicted.

    Attributes:
        of: the layer whose cache it is. is_last: whether no other reads it after this one.
    """

    of: LayerContext
    is_last: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def attend(self, call: AttentionInputs, out: torch.Tensor) -> bool:
        """See `LayerContext`."""
        return self.of.attend(call, out)

    def after_attention(self, call: AttentionInputs) -> None:
        """See `LayerContext`."""
        if self.is_last:
            self.of.after_last_reader()
