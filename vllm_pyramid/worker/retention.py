# SPDX-License-Identifier: Apache-2.0
"""What each request of a step has given up, and whose prompt ends in it.

The worker is never told which blocks were freed. It needs no telling: the skip of a layer is a
function of the prompt length, in force once the whole prompt was computed before the step began. So
preemption resets it by itself, and scheduler and workers agree without a message.

Shape legend: L layers, R requests of the step, E requests whose prompt ends in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.config import settle
from vllm_pyramid.policy.base import Policy, RetentionPlan

IntArray = npt.NDArray[np.int32]


@dataclass
class StepEvictions:
    """The requests whose prompt ends in this step; each may have something to give, or nothing.

    Attributes:
        request_ids: E names.
        rows: `[E]` int64, their rows of the batch.
        query_ends: `[E]` int32, one behind their last query in the step's query tensor.
        query_lens: `[E]` int32, their queries in the step: the last chunk of the prompt.
        prompt_lens: `[E]` int32.
        helds: `[L, E]` int32, tokens that stay in each layer.
        gives: `[E]` bool, whether the request's plan shortens any layer.
        tokens_done: `[E]` int64, tokens evicted so far, over all layers; reported to the scheduler.
    """

    request_ids: list[str]
    rows: npt.NDArray[np.int64]
    query_ends: IntArray
    query_lens: IntArray
    prompt_lens: IntArray
    helds: IntArray
    budgets: IntArray
    gives: npt.NDArray[np.bool_] = field(init=False)
    tokens_done: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.gives = np.any(self.helds < self.prompt_lens, axis=0)
        self.tokens_done = np.zeros(len(self.request_ids), np.int64)


@dataclass
class StepRetention:
    """One step, for all layers; built once and shared by their metadata.

    Attributes:
        skips: `[L, R]` int32 on the host, tokens below which a request's table is not valid.
        evictions: the prompts that end now, or None.
    """

    skips: IntArray
    evictions: StepEvictions | None

    @classmethod
    def nothing(cls, num_layers: int, num_reqs: int) -> StepRetention:
        """A step in which every request has its whole cache and none ends its prompt."""
        return cls(np.zeros((num_layers, num_reqs), np.int32), None)

    def report(self) -> dict[str, int]:
        """`{request id: tokens evicted over all layers}` of those that give, for the scheduler."""
        if self.evictions is None:
            return {}
        done = self.evictions.tokens_done.tolist()
        return {
            self.evictions.request_ids[i]: done[i] for i in np.flatnonzero(self.evictions.gives)
        }


class Retention:
    """The plans of the requests that a model runner knows, and the current step.

    Args:
        policy: the engine's policy. num_layers: L. block_size: tokens of a cache block.
        max_num_reqs: rows of the runner's batch.
    """

    def __init__(self, policy: Policy, num_layers: int, block_size: int, max_num_reqs: int) -> None:
        self.policy = policy
        self.num_layers = num_layers
        self.block_size = block_size
        self.step = StepRetention.nothing(num_layers, 0)
        self._plans: dict[str, RetentionPlan] = {}
        # The skips of the request in each row, refreshed only when a row changes hands: a decode
        # step over hundreds of requests then costs two array operations, not a Python loop of them.
        self._row_plan: list[RetentionPlan | None] = [None] * max_num_reqs
        self._row_skips = np.zeros((max_num_reqs, num_layers), np.int32)

    def add(self, request_id: str, prompt_len: int, extra_args: dict[str, Any] | None) -> None:
        """A request has come (or come back): make its plan."""
        policy, budget, _ = settle(self.policy, extra_args)
        self._plans[request_id] = policy.plan(prompt_len, self.num_layers, self.block_size, budget)

    def remove(self, request_id: str) -> None:
        """A request has finished."""
        self._plans.pop(request_id, None)

    def begin_step(
        self,
        request_ids: Sequence[str],
        prompt_lens: IntArray,
        computed: IntArray,
        scheduled: IntArray,
    ) -> StepRetention:
        """Work out the step's skips and evictions.

        Args:
            request_ids: R names, in batch order; each was given to `add`.
            prompt_lens: `[R]` tokens of the prompts (without generated tokens).
            computed: `[R]` tokens computed before the step. scheduled: `[R]` tokens of the step.
        """
        num_reqs = len(request_ids)
        for row, request_id in enumerate(request_ids):
            plan = self._plans[request_id]
            if self._row_plan[row] is not plan:
                self._row_plan[row] = plan
                self._row_skips[row] = plan.skip
        past_prompt = computed >= prompt_lens
        skips = np.ascontiguousarray((self._row_skips[:num_reqs] * past_prompt[:, None]).T)
        ending = np.flatnonzero(~past_prompt & (computed + scheduled >= prompt_lens))
        evictions = None
        if ending.size:
            giving = ending[self._row_skips[ending].any(axis=1)]
            assert (computed + scheduled)[giving].tolist() == prompt_lens[giving].tolist(), (
                "a chunk crosses the end of a prompt that is to be evicted"
            )
            plans = [self._plans[request_ids[row]] for row in ending]
            evictions = StepEvictions(
                request_ids=[request_ids[row] for row in ending],
                rows=ending,
                query_ends=np.cumsum(scheduled, dtype=np.int32)[ending],
                query_lens=scheduled[ending].astype(np.int32),
                prompt_lens=prompt_lens[ending].astype(np.int32),
                helds=np.stack([plan.held for plan in plans], axis=1),
                budgets=np.array([plan.budget_tokens for plan in plans], np.int32),
            )
            if self.policy.needs_scores:
                short = scheduled[giving] < self.policy.window
                assert not short.any(), "a last prompt chunk is shorter than the observation window"
        self.step = StepRetention(skips, evictions)
        return self.step

    def take_report(self) -> dict[str, int]:
        """The step's report to the scheduler, once."""
        report = self.step.report()
        self.step.evictions = None
        return report

    def idle_step(self, num_reqs: int) -> StepRetention:
        """A step without real requests (profiling, warm-up, graph capture)."""
        self.step = StepRetention.nothing(self.num_layers, num_reqs)
        return self.step
