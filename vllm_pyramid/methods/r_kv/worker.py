# SPDX-License-Identifier: Apache-2.0
"""Scores by the last queries before an eviction, which requests keep over the steps before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_pyramid.methods.next_evictions import next_evictions
from vllm_pyramid.step.hooks import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    StepNeeds,
    WorkerContext,
)
from vllm_pyramid.step.recent_queries import Copies, RecentQueries

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.policy.scorer import Scorer
    from vllm_pyramid.step.attention_inputs import AttentionInputs
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.step import Step


class RecentScores(CacheHooks, StepHooks, LayerHooks, EvictionHooks):
    """Keeps the window's queries of all layers, and scores by them; one object a worker."""

    name = "recent queries"

    def __init__(self, policy: Policy, scorer: Scorer, context: WorkerContext) -> None:
        self.policy, self.scorer, self.inside = policy, scorer, context.inside
        self.queries, self._copies = RecentQueries(context, policy.window), Copies()

    def bytes_of_buffers(self) -> int:
        return self.queries.num_bytes

    def allocate(self, num_blocks: int) -> None:
        self.queries.allocate()

    def begin_step(self, step: Step) -> StepNeeds | None:
        point, looks = next_evictions(step, self.policy, self.scorer, inside=self.inside)
        self._copies = Copies()
        ends = step.computed + step.scheduled
        for row in np.flatnonzero(looks & (ends > point - self.policy.window)).tolist():
            self.queries.keep(step, row, int(point[row]), self._copies)
        return None

    def after_attention(self, inputs: AttentionInputs) -> None:
        self.queries.copy(inputs, self._copies)

    def score(self, batch: EvictionBatch) -> torch.Tensor | None:
        if batch.policy.scorer != self.scorer:
            return None  # another scorer has evictions inside the prompt, or at its end
        slots = self.queries.slots(batch.request_ids)
        return self.scorer.scores(batch.with_queries(self.queries.of(int(batch.layers[0]), slots)))

    def end_step(self, step: Step) -> None:
        self._copies = Copies()
        if step.evictions is not None:
            for name in step.evictions.request_ids:
                self.forget(name)

    def forget(self, request_id: str) -> None:
        self.queries.forget(request_id)
