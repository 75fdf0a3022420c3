# SPDX-License-Identifier: Apache-2.0
"""What a layer's metadata builder and attention share: given to both by the model runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_pyramid.attention.cpu_metadata import PyramidCpuMetadata, check_size
from vllm_pyramid.attention.deferred import DeferredEviction
from vllm_pyramid.attention.evict import evict_layer
from vllm_pyramid.attention.shifted_tables import ShiftedTables
from vllm_pyramid.attention.step_end import StepEndEviction
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
from vllm_pyramid.step.hooks import MethodHooks, WorkerHooks
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.score_check import check_attention
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace import TraceWriter


class StepSource(Protocol):
    """Where the layers of a worker find the policy and the current step.

    Attributes:
        policy: the served policy. step: the step that runs now.
        num_layers: the tables of all layers: numbers that a plan has.
    """

    policy: Policy
    step: Step
    num_layers: int


@dataclass
class LayerContext:
    """One attention layer's place in the policy, and how it reads its one block table.

    Layouts with other tables (`TableLayout`) have subclasses of it.

    Attributes:
        computes_log_sum_exp: whether the CPU's attention can keep it for scorers.
        layer: index of this one, from the bottom. ranks: that share the KV heads; None for one.
        trace: writes kept positions, or None; set when the worker's warm-up is over.
        shifted: short tables of all layers, on devices whose kernels need them.
        deferred: evictions that wait for the last layer, shared by all layers; None where the
            policy's plans are never deferred. step_end: the same for plans that are decided.
        values: V of a layer whose pages hold K alone, `[P, G, N, D]`; None: V is in the pages.
        has_readers: whether layers above attend to this one's cache; it evicts after the last.
        tables_per_layer: how many numbers a plan has for a layer.
    """

    computes_log_sum_exp: ClassVar[bool] = True

    tracker: StepSource
    layer: int
    hooks: MethodHooks = field(default_factory=MethodHooks)
    ranks: Ranks | None = None
    rotary: Rotary | None = None
    trace: TraceWriter | None = None
    shifted: ShiftedTables | None = None
    deferred: DeferredEviction | None = None
    step_end: StepEndEviction | None = None
    values: torch.Tensor | None = None
    has_readers: bool = False
    tables_per_layer: int = 1
    _attended: AttentionInputs | None = None

    @property
    def step(self) -> Step:
        return self.tracker.step

    def cpu_metadata(self, common: CommonAttentionMetadata) -> PyramidCpuMetadata:
        """Return the layer's view of the current step, for the CPU's attention."""
        step, layer, num_reqs = self.step, self.layer, common.num_reqs
        if (layout := step.layout) is not None:
            return PyramidCpuMetadata(
                num_tokens=int(layout.query_starts[layer, -1]),
                block_table=common.block_table_tensor,
                query_start_loc=torch.from_numpy(layout.query_starts[layer]),
                seq_lens=torch.from_numpy(layout.seq_lens[layer]),
                skips=torch.from_numpy(layout.skips[layer]),
            )
        skips = torch.from_numpy(step.skips[layer])
        check_size(num_reqs, skips.numel())
        return PyramidCpuMetadata(
            num_tokens=common.num_actual_tokens,
            block_table=common.block_table_tensor,
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            seq_lens=common.seq_lens[:num_reqs],
            skips=skips,
        )

    def to_write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values, `[T, G, D]`, and slots as the layer's table takes them."""
        layout = self.step.layout
        return key, value, slots if layout is None else layout.slots(self.layer, slots)

    def attention_of(self, impl: Any) -> Any:
        """Return the function with which a CUDA back end attends, called as its `forward`."""
        return impl.stock_attention

    def after_write(self, write: CacheWrite) -> None:
        """Tell methods of the layer's new tokens, which have been written."""
        for hooks in self.hooks.after_write:
            try:
                hooks.after_write(write)
            except Exception as error:
                self._add_error("after_write", hooks, error)

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return what the layer attends to, which methods may have chosen."""
        for hooks in self.hooks.before_attention:
            try:
                inputs = hooks.before_attention(inputs)
            except Exception as error:
                self._add_error("before_attention", hooks, error)
        return inputs

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        for hooks in self.hooks.attend:
            try:
                if hooks.attend(inputs, out):
                    return True
            except Exception as error:
                self._add_error("attend", hooks, error)
                out.zero_()
                return True
        return False

    def after_attention(self, inputs: AttentionInputs, out: torch.Tensor) -> None:
        """Let methods look at the layer, which has attended; then evict where the step asks for it.

        `inputs` are as they were before `before_attention`; `out` is the attention, `[>= T, H, D]`.
        """
        for hooks in self.hooks.after_attention:
            try:
                hooks.after_attention(inputs)
            except Exception as error:
                self._add_error("after_attention", hooks, error)
        if self.step.evictions is None:
            return
        if (self.layer + 1) * self.tables_per_layer == self.tracker.num_layers:
            check_attention(self.step, self.layer, out)
        self.evict_from(inputs, self.step.evictions)

    def evict_from(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        """Evict from the layer's tables, or keep its inputs for `after_last_reader`."""
        if self.has_readers:
            # The layers in between may use the memory of these queries again.
            batch = replace(inputs.batch, query=inputs.query.clone())
            self._attended = replace(inputs, batch=batch)
        else:
            self.evict(inputs, evictions)

    def after_last_reader(self) -> None:
        """Evict where the step asks for it: the last layer that reads this cache has attended."""
        if self.step.evictions is not None:
            if self._attended is None:
                raise RuntimeError(f"layer {self.layer} is to evict and has not attended")
            self.evict(self._attended, self.step.evictions)
        self._attended = None

    def evict(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        """Evict from this layer, or from all layers with the last one where that was deferred."""
        if self.step_end is not None:
            self.step_end.add_layer(inputs, evictions, self.trace, self.split)
            return
        for table in self.split(inputs):
            self.evict_table(table, evictions)

    def split(self, inputs: AttentionInputs) -> Iterable[AttentionInputs]:
        """Return the inputs of each of the layer's tables: of its only one."""
        return (inputs,)

    def evict_table(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        evict_layer(self.tracker.policy, inputs, evictions, self.hooks, self.trace)
        if self.deferred is not None:
            self.deferred.add_layer(inputs, evictions, self.trace)
        for hooks in self.hooks.after_eviction:
            try:
                hooks.after_eviction(inputs, evictions)
            except Exception as error:
                what = f"`after_eviction` of {hooks.label}"
                evictions.failures.add_error(
                    evictions.request_ids, what, error, peers_wait=hooks.asks_ranks
                )

    def _add_error(self, function: str, hooks: WorkerHooks, error: Exception) -> None:
        self.step.add_error(f"`{function}` of {hooks.label}", error, peers_wait=hooks.asks_ranks)


def own_inputs(inputs: AttentionInputs, attended: AttentionInputs) -> AttentionInputs:
    """Return the layer's inputs, without the log-sum-exp of what a method has chosen."""
    return inputs if attended is inputs else replace(inputs, log_sum_exp=None)


@dataclass
class ReaderContext:
    """The place of a layer that reads the cache of layer `of`, perhaps as the last one."""

    of: LayerContext
    is_last: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        return self.of.before_attention(inputs)

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        return self.of.attend(inputs, out)

    def after_attention(self, inputs: AttentionInputs, out: torch.Tensor) -> None:
        if self.is_last:
            self.of.after_last_reader()
