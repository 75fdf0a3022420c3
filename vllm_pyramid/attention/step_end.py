# SPDX-License-Identifier: Apache-2.0
"""Evictions of all layers once a step, where a launch costs more than what it does.

    each layer       attention; the last queries of the requests that end are copied: one launch
    the last layer   score, check, select, compact: a few launches for all layers and requests

Nothing reads a layer's cache between its attention and the end of the step, so what is evicted is
the same. It takes layers whose caches are one tensor, and a policy that asks nothing of a single
layer's moment: no method works beside its evictions, no lengths follow from scores, and its scorers
can score rows of several layers (`Scorer.queries_at_step_end`). Requests whose queries exceed
`QUERIES_BYTES` are evicted layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.attention.evict import evict_batch, evict_layer, score_batch, taken_scores
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_memory import QUERIES_BYTES, pieces, queries_at_step_end
from vllm_pyramid.step.eviction_rows import (
    JoinedTables,
    batch_of_layers,
    copy_overwritten,
    without_query,
)
from vllm_pyramid.step.hooks import EvictionHooks, MethodHooks
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.step.upload import upload

Indices = npt.NDArray[np.int64]
Split = Callable[[AttentionInputs], Iterable[AttentionInputs]]


class StepEndEviction:
    """The layers of a step that wait for the last one; one object for all layers of a worker.

    `queries` are the last ones of a request that scorers look at; `num_layers` of this worker count
    KV heads with block tables as layers.
    """

    def __init__(
        self,
        policy: Policy,
        hooks: MethodHooks,
        queries: int,
        num_layers: int,
        tables_per_layer: int,
    ) -> None:
        self.policy, self.hooks, self.queries = policy, hooks, queries
        self.num_layers, self._tables_per_layer = num_layers, tables_per_layer
        self._evictions: StepEvictions | None = None
        # What takes the step's scores in place of an eviction, and of which requests.
        self._taking: tuple[EvictionHooks, StepEvictions] | None = None
        self._calls: list[AttentionInputs] = []
        self._queries: list[torch.Tensor] = []
        self._chosen: Indices = np.zeros(0, np.int64)
        self._others: Indices = self._chosen
        self._index: torch.Tensor | None = None
        self._memory: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        policy: Policy,
        hooks: MethodHooks,
        num_layers: int,
        *,
        tables_per_layer: int = 1,
        traces: bool = False,
    ) -> StepEndEviction | None:
        """Return what a worker needs, or None where the policy evicts layer by layer."""
        queries = queries_at_step_end(policy, traces)
        if queries is None or hooks.in_evictions:
            return None
        if not all(policy.values.on_device(layer) for layer in range(num_layers)):
            return None
        return cls(policy, hooks, queries, num_layers, tables_per_layer)

    def add_layer(
        self,
        inputs: AttentionInputs,
        evictions: StepEvictions,
        trace: TraceWriter | None,
        split: Split,
    ) -> None:
        """Keep what a layer's evictions look at; with the last layer, evict from all."""
        if evictions is not self._evictions:
            self._begin(inputs, evictions)
        if self._others.size:
            for call in split(inputs):
                evict_layer(self.policy, call, evictions, self.hooks, trace, self._others)
        kept = self._with_last_queries(inputs)
        for call in split(kept):
            self._queries.append(call.query)
            self._calls.append(without_query(call))
        if len(self._calls) < self.num_layers:
            return
        calls, queries_of, memory = self._calls, self._queries, self._memory
        self._forget()
        kinds = _of_one_kind(calls)
        for own in kinds:
            of_kind = [calls[place] for place in own]
            if len(kinds) == 1 and memory is not None and len(memory) == len(calls):
                queries = memory.flatten(0, 1)
            else:
                queries = torch.cat([queries_of[place] for place in own])
            first = of_kind[0]
            of_kind[0] = replace(first, batch=replace(first.batch, query=queries))
            self._evict(of_kind, evictions, trace)

    def _begin(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        """Choose the requests that are evicted at the step's end, and find their last queries."""
        self._forget()
        self._evictions, self._index, query = evictions, None, inputs.query
        self._taking = taken_scores(self.hooks, evictions)
        scored, wanted = evictions, evictions.shortened_anywhere()
        if self._taking is not None:
            _, scored = self._taking
            wanted = np.arange(len(scored.request_ids))
        heads = query[0].numel() * query.element_size() if len(query) else 0
        of_each = self.num_layers * self.queries * heads // self._tables_per_layer
        most = max(1, QUERIES_BYTES // of_each) if of_each else len(wanted)
        self._chosen, self._others = wanted[:most], wanted[most:]
        if self.queries and self._chosen.size:
            ends = scored.query_ends[self._chosen].astype(np.int64)
            places = ends[:, None] + np.arange(-self.queries, 0)
            self._index = upload(places.clip(min=0).ravel(), query.device)
            layers = self.num_layers // self._tables_per_layer
            self._memory = query.new_empty(layers, len(self._index), *query.shape[1:])

    def _with_last_queries(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return a layer's inputs with a copy of the last queries of the chosen requests alone."""
        kept, memory = without_query(inputs), self._memory
        if self._index is None or memory is None:
            return kept
        place, query = len(self._calls) // self._tables_per_layer, inputs.query
        if query.shape[1:] == memory.shape[2:]:
            queries = torch.index_select(query, 0, self._index, out=memory[place])
        else:  # a layer with other heads than the first
            queries = query.index_select(0, self._index)
        return replace(kept, batch=replace(kept.batch, query=queries))

    def _forget(self) -> None:
        self._evictions, self._calls, self._queries = None, [], []
        self._memory = None

    def _evict(
        self, calls: list[AttentionInputs], evictions: StepEvictions, trace: TraceWriter | None
    ) -> None:
        """Evict from layers whose rows the same kernels take together, or have them scored."""
        joined, of_layers, taker = JoinedTables(calls), [self._chosen] * len(calls), None
        if self._taking is not None:
            taker, evictions = self._taking
        else:
            own = np.setdiff1d(evictions.decided, self._others).tolist()
            copy_overwritten(evictions, calls, own, self.hooks.copy_blocks, joined)
            of_layers = [np.intersect1d(evictions.shortened(c.layer), self._chosen) for c in calls]
        places = np.repeat(np.arange(len(calls)), [len(indices) for indices in of_layers])
        shortened = np.concatenate(of_layers)
        ranks = np.searchsorted(self._chosen, shortened)
        ends = (places * len(self._chosen) + ranks + 1) * self.queries
        layers = np.array([call.layer for call in calls])[places]
        lens = evictions.held(layers, shortened).lens
        inside = evictions.inside_prompt[shortened]
        for policy, which in (
            (self.policy, np.flatnonzero(~inside)),
            (self.policy.inner_policy or self.policy, np.flatnonzero(inside)),
        ):
            if not which.size:
                continue
            for piece in pieces(lens[which], calls[0].key_cache.shape[1]):
                rows = which[piece]
                of_rows = places[rows], shortened[rows], ends[rows]
                batch = batch_of_layers(
                    evictions, calls, joined, policy, *of_rows, num_queries=self.queries
                )
                if taker is not None:
                    score_batch(batch, taker)
                else:
                    evict_batch(batch, None, self.hooks, trace)


def _of_one_kind(calls: Sequence[AttentionInputs]) -> list[list[int]]:
    """Return the places of the calls in groups that differ in their tables and queries alone."""
    groups: dict[Hashable, list[int]] = {}
    for place, call in enumerate(calls):
        cache, softmax, batch = call.key_cache, call.softmax, call.batch
        kind = (
            (call.query.shape[1:], cache.shape, cache.stride(), cache.storage_offset()),
            (cache.dtype, softmax.scale, softmax.soft_cap, id(softmax.sinks)),
            (batch.key_scale, batch.value_scale, batch.key_scales is None),
            None if call.rotary is None else (id(call.rotary.cos_sin), call.rotary.halves),
            call.block_table.shape[1],
        )
        groups.setdefault(kind, []).append(place)
    return list(groups.values())
