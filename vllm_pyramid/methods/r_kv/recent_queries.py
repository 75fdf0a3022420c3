# SPDX-License-Identifier: Apache-2.0
"""The last queries before an eviction, which come in as many steps as there are of them.

    computed tokens    ..... p - W ............ p        p: the next eviction, W: `window`
    a step's queries         kept, in place 0 .. W - 1   `after_attention`
    at p                     scored by, all W            `score`

A request has a slot from the first of these queries to its eviction, the same in all layers. There
are as many as requests run at once; a preempted request gives its own back.

Shape legend: L layers, S slots or requests that evict, W queries, H query heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_pyramid.methods.next_evictions import next_evictions
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    StepNeeds,
    WorkerContext,
)
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.policy.scorer import Scorer


class RecentQueries(CacheHooks, StepHooks, LayerHooks, EvictionHooks):
    """The queries of all layers; one object a worker.

    Attributes:
        queries: `[L, S, W, H, D]`, of the model's dtype.
    """

    name = "recent queries"

    def __init__(self, policy: Policy, scorer: Scorer, context: WorkerContext) -> None:
        self.policy, self.scorer, self.context = policy, scorer, context
        self.inside = context.inside
        model, parallel = context.config.model_config, context.config.parallel_config
        heads, slots = (
            model.get_num_attention_heads(parallel),
            context.config.scheduler_config.max_num_seqs,
        )
        layers, size = len(context.specs), context.specs[0].head_size
        self._shape = layers, slots, policy.window, heads, size
        assert isinstance(model.dtype, torch.dtype), "vLLM has resolved it"
        self._dtype = model.dtype
        self._place_of_layer = {spec.layer_idx: i for i, spec in enumerate(context.specs)}
        self.queries = torch.empty(0)
        self._slots: dict[str, int] = {}
        self._held: dict[str, int] = {}  # queries of each request's slot
        self._free: list[int] = []
        # Of the step: rows of its query tensor, and where they go.
        self._rows: torch.Tensor | None = None
        self._places: torch.Tensor | None = None

    def bytes_of_buffers(self) -> int:
        return int(np.prod(self._shape)) * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        self.queries = torch.empty(0)  # two generations never exist together
        with torch.inference_mode(False):
            self.queries = torch.zeros(self._shape, dtype=self._dtype, device=self.context.device)
        self._slots, self._held = {}, {}
        self._free = list(range(self._shape[1]))

    def begin_step(self, step: Step) -> StepNeeds | None:
        """Find the queries of the step that score a request's next eviction."""
        point, looks = next_evictions(step, self.policy, self.scorer, inside=self.inside)
        window = self.policy.window
        ends = step.computed + step.scheduled
        rows: list[int] = []
        places: list[int] = []
        for row in np.flatnonzero(looks & (ends > point - window)).tolist():
            name, computed = step.requests[row].request_id, int(step.computed[row])
            first = max(computed, int(point[row]) - window)
            begin = int(step.scheduled[:row].sum()) - computed
            slot, offset = self._slot(name), first - (int(point[row]) - window)
            count = int(ends[row]) - first
            if offset == 0:
                self._held[name] = 0
            self._held[name] = self._held.get(name, 0) + count
            rows += range(begin + first, begin + first + count)
            places += range(slot * window + offset, slot * window + offset + count)
        self._rows = self._places = None
        if rows:
            device = self.context.device
            self._rows = upload(np.array(rows, np.int64), device)
            self._places = upload(np.array(places, np.int64), device)
        return None

    def _slot(self, name: str) -> int:
        if (slot := self._slots.get(name)) is None:
            # There is one: requests that are preempted or have finished give theirs back.
            slot = self._slots[name] = self._free.pop()
        return slot

    def after_attention(self, inputs: AttentionInputs) -> None:
        """Keep the layer's queries that score the next evictions."""
        if self._rows is None or self._places is None:
            return
        of_layer = self.queries[self._place_of_layer[inputs.layer]].flatten(0, 1)
        of_layer[self._places] = inputs.query[self._rows].to(of_layer.dtype)

    def score(self, batch: EvictionBatch) -> torch.Tensor | None:
        """Score by all of the window's queries, those of earlier steps among them."""
        if batch.policy.scorer != self.scorer:
            return None  # another scorer has evictions inside the prompt, or at its end
        names, window = batch.request_ids, self.policy.window
        for name in names:
            if (held := self._held.get(name, 0)) != window:
                raise RuntimeError(
                    f"request {name}: {held} queries of the {window} before its eviction were "
                    "kept; report this"
                )
        of_layer = self.queries[self._place_of_layer[int(batch.layers[0])]]
        slots = upload(np.array([self._slots[name] for name in names], np.int64), of_layer.device)
        return self.scorer.scores(batch.with_queries(of_layer[slots]))

    def end_step(self, step: Step) -> None:
        """Give back the slots of requests that have come to an eviction."""
        self._rows = self._places = None
        if step.evictions is not None:
            for name in step.evictions.request_ids:
                self.forget(name)

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._free.append(slot)
