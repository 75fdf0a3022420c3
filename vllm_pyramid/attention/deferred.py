# SPDX-License-Identifier: Apache-2.0
"""Evictions whose lengths are decided from the scores of all layers.

    layer 0 .. L-2    attention, scores: kept until the step's last layer has attended
    layer L-1         attention, scores -> decide -> select and compact all layers

Meanwhile `[S, G, context]` float32 is kept for each layer and the S prompts that end. Where fewer
layers share a total (`EvictionHooks.together`), this goes group by group.

A request whose scores or evidence have NaN has failed, and its scores are replaced: the lengths of
the others do not depend on it. Where a method raises, the requests of that call get the same length
in all layers. The ranks agree beforehand that all decide, since they wait for one another there.

Shape legend: L layers whose lengths are decided together, S prompts, G KV heads of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.attention.evict import shorten
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.eviction_rows import copy_overwritten, without_query
from vllm_pyramid.step.failures import METHOD, Failure
from vllm_pyramid.step.hooks import EvictionHooks, MethodHooks
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.score_check import mark_wrong_scores, replaced
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.step.upload import upload
from vllm_pyramid.step.window_mass import WindowMass, window_mass


@dataclass(frozen=True)
class ScoredLayer:
    """A layer that waits for the last one.

    `batch` has no queries; `scores` are `[S, G, columns]`; `evidence` is None where a method
    failed; `mass` is of the window, if there is a trace.
    """

    batch: EvictionBatch
    scores: torch.Tensor
    evidence: torch.Tensor | None
    mass: WindowMass | None


class DeferredEviction:
    """The layers of a step that wait for the last one; one object for all layers of a worker.

    `method` is the one that decides lengths, of the policy's `hooks`.
    """

    def __init__(
        self, policy: Policy, hooks: MethodHooks, method: EvictionHooks, num_layers: int
    ) -> None:
        self.policy, self.hooks, self.method = policy, hooks, method
        self.num_layers = num_layers
        self.together = method.together or num_layers
        self._evictions: StepEvictions | None = None
        self._groups: list[npt.NDArray[np.int64]] = []
        self._layers: list[list[ScoredLayer]] = []
        self._first = 0  # of those in `_layers`

    @classmethod
    def of(cls, policy: Policy, hooks: MethodHooks, num_layers: int) -> DeferredEviction | None:
        """Return what a worker needs, or None where no method decides lengths."""
        if hooks.decides is None:
            return None
        return cls(policy, hooks, hooks.decides, num_layers)

    def add_layer(
        self, inputs: AttentionInputs, evictions: StepEvictions, trace: TraceWriter | None
    ) -> None:
        """Score open requests; with the last layer that shares a total, decide and evict."""
        if evictions.deferred.size == 0:
            return  # only prompts whose lengths are known
        if evictions is not self._evictions:
            self._evictions, self._layers, self._first = evictions, [], 0
            self._groups = _alike(evictions, inputs)
        layer, before = inputs.layer, self._first + len(self._layers)
        if layer != before:
            raise RuntimeError(
                f"layer {layer} came after {before} others: lengths are decided from the "
                "scores of all layers, from the bottom up; report this"
            )
        groups = self._groups
        self._layers.append([self._score(inputs, evictions, group, trace) for group in groups])
        if len(self._layers) < self.together:
            return
        layers, self._layers = self._layers, []
        if layer == self.num_layers - 1:
            self._evictions = None
        for index, group in enumerate(groups):
            of_group = [waiting[index] for waiting in layers]
            self._decide(evictions, group, [scored.evidence for scored in of_group], inputs.ranks)
            self._evict(evictions, group, of_group, trace)
        self._first = layer + 1

    def _score(
        self,
        inputs: AttentionInputs,
        evictions: StepEvictions,
        group: npt.NDArray[np.int64],
        trace: TraceWriter | None,
    ) -> ScoredLayer:
        batch = evictions.batch(inputs, self.policy, group)
        scores = evidence = mass = None
        try:
            scores, evidence = self._scores(batch)
            mass = window_mass(batch) if trace is not None else None
        except Exception as error:
            what, asks = (
                f"the scores of the policy {self.policy.name!r}",
                self.policy.scorer.asks_ranks,
            )
            evictions.failures.add_error(batch.request_ids, what, error, peers_wait=asks)
        if scores is None:
            columns = max(batch.longest - self.policy.window, 0)
            scores = torch.zeros(
                len(group), inputs.key_cache.shape[1], columns, device=inputs.query.device
            )
        return ScoredLayer(replace(batch, call=without_query(inputs)), scores, evidence, mass)

    def _scores(self, batch: EvictionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores without columns of the window, and what they say about the lengths."""
        scores = self.policy.scorer.scores(batch)
        context = batch.longest - self.policy.window
        if scores.shape[2] > context or not self.policy.window:  # with columns behind a context
            scores = scores[:, :, :context]
            columns = torch.arange(scores.shape[2], device=scores.device)
            behind = columns >= (batch.lens - self.policy.window)[:, None]
            scores = scores.masked_fill(behind[:, None], -torch.inf)
        wrong = mark_wrong_scores(batch, scores)
        scores = replaced(scores, wrong, 0.0)
        evidence = self.method.evidence(scores)
        unusable = (~(evidence < torch.inf)).view(len(evidence), -1).any(dim=1)
        reason = f"layer {batch.call.layer}: what its scores say about the lengths has NaN"
        batch.evictions.failures.flag(Failure(METHOD, reason), batch.request_ids, unusable & ~wrong)
        return scores, replaced(evidence, wrong | unusable, 1.0)

    def _decide(
        self,
        evictions: StepEvictions,
        group: npt.NDArray[np.int64],
        evidence: Sequence[torch.Tensor | None],
        ranks: Ranks | None,
    ) -> None:
        """Decide the lengths of a group of prompts. `evidence` is `[S, ...]`, of L layers."""
        plans = [evictions.open_plan(request) for request in group.tolist()]
        open_requests = set(group.tolist())
        names = [evictions.request_ids[request] for request in group.tolist()]
        known = [layer for layer in evidence if layer is not None]
        failed = len(known) < len(evidence)
        what = f"the lengths of the policy {self.policy.name!r}"
        lengths: Sequence[npt.NDArray[np.int64] | Exception] = ()
        if not (failed if ranks is None else ranks.any(failed)):
            try:
                lengths = self.method.decide(plans, torch.stack(known))
            except Exception as error:
                asks = self.method.asks_ranks
                evictions.failures.add_error(names, what, error, peers_wait=asks)
        for name, request, keep in zip(names, group.tolist(), lengths, strict=bool(lengths)):
            try:
                if isinstance(keep, Exception):
                    raise keep
                evictions.resolve(request, keep, self._first)
                open_requests.remove(request)
            except Exception as error:
                evictions.failures.add_error([name], what, error)
        for request, plan in zip(group.tolist(), plans, strict=True):
            if request in open_requests:
                alike = np.full(self.together, plan.floor + plan.mean)
                evictions.resolve(request, alike, self._first)

    def _evict(
        self,
        evictions: StepEvictions,
        group: npt.NDArray[np.int64],
        layers: list[ScoredLayer],
        trace: TraceWriter | None,
    ) -> None:
        """Select and compact every layer in which some prompt keeps less than everything."""
        decided = slice(self._first, self._first + self.together)
        host_keeps = np.ascontiguousarray(evictions.kept_lens[decided, group])
        keeps = upload(host_keeps, layers[0].scores.device)
        for layer, waiting in enumerate(layers):
            calls, own = [waiting.batch.call], group.tolist()
            copy_overwritten(evictions, calls, own, self.hooks.copy_blocks)
            batch = replace(waiting.batch, keeps=keeps[layer], host_keeps=host_keeps[layer])
            if not (batch.host_keeps < batch.host_lens).any():
                continue
            try:
                shorten(batch, waiting.scores, self.hooks, trace, waiting.mass)
            except Exception as error:
                what = f"an eviction of the policy {self.policy.name!r}"
                evictions.failures.add_error(batch.request_ids, what, error)


def _alike(evictions: StepEvictions, inputs: AttentionInputs) -> list[npt.NDArray[np.int64]]:
    """Return the open prompts in groups of similar length, at most twice as long as one another.

    The scores of a group are padded to its longest prompt and kept until the last layer: with one
    long prompt, many short ones would cost as much.
    """
    indices = evictions.deferred
    size = np.ceil(np.log2(evictions.points[indices]))
    alike = [indices[size == some] for some in np.unique(size)]
    return [piece for group in alike for piece in evictions.pieces(inputs, group)]
