# SPDX-License-Identifier: Apache-2.0
"""What each request of a step has given up, and who evicts in it.

`retention.py` builds it once a step, from the requests' plans; all layers share it.

Shape legend: L layers, R requests of the step, E requests that evict in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_pyramid.policy.plans import Eviction, OpenPlan, Plan, RetentionPlan
from vllm_pyramid.worker.choice import StepChoice
from vllm_pyramid.worker.thinning import StepThinning

IntArray = npt.NDArray[np.int32]


@dataclass
class StepEvictions:
    """The requests that come to an eviction in this step; each may have something to give, or not.

    Attributes:
        request_ids: E names.
        rows: `[E]` int64, their rows of the batch.
        query_ends: `[E]` int32, one behind their last query in the step's query tensor.
        query_lens: `[E]` int32, their queries in the step: at a prompt's end, its last chunk.
        prompt_lens: `[E]` int32, tokens computed after the step: the prompt's, or more if the
            eviction is a later one.
        plans: E plans of this eviction; open ones until they are solved in this step.
        numbers: E numbers of the evictions, 1 at a prompt's end; None: all of them are that.
        befores: `[L, E]` int32, skips that held until now; None: no skips.
        helds: `[L, E]` int32, tokens that stay in each layer; all of them while a plan is open.
        budgets: `[E]` int32, mean tokens a layer; what an open plan came to, once it is solved.
        unsolved: indices of the requests whose plan was open when the step began.
        gives: `[E]` bool, whether the request has something to report: its plan shortens a layer,
            or was open.
        tokens_done: `[E]` int64, tokens evicted so far, over all layers; reported to the scheduler.
    """

    request_ids: list[str]
    rows: npt.NDArray[np.int64]
    query_ends: IntArray
    query_lens: IntArray
    prompt_lens: IntArray
    plans: list[Plan]
    numbers: list[int] = field(default_factory=list)
    befores: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    helds: IntArray = field(init=False)
    budgets: IntArray = field(init=False)
    unsolved: npt.NDArray[np.int64] = field(init=False)
    gives: npt.NDArray[np.bool_] = field(init=False)
    tokens_done: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        is_open = np.array([isinstance(plan, OpenPlan) for plan in self.plans], bool)
        self.unsolved = np.flatnonzero(is_open)
        # Prompts that were thinned between layers have given what they give (`thinner.py`).
        self._thinned = np.array(
            [isinstance(plan, RetentionPlan) and bool(plan.pieces) for plan in self.plans], bool
        )
        self.helds = np.stack([_held(plan) for plan in self.plans], axis=1)
        self.numbers = self.numbers or [1] * len(self.plans)
        if not self.befores.size:
            self.befores = np.zeros_like(self.helds)
        assert (self.helds <= self.prompt_lens - self.befores).all(), (
            "a layer is to keep more tokens than it has: the allocator or schedule of this policy "
            "does not fall back to fewer tokens as more are computed"
        )
        self.budgets = np.array([plan.budget_tokens for plan in self.plans], np.int32)
        self.gives = is_open | np.any(self.helds < self.prompt_lens - self.befores, axis=0)
        self.tokens_done = np.zeros(len(self.request_ids), np.int64)

    def chosen(self, layer: int) -> npt.NDArray[np.int64]:
        """Indices of the requests that this layer shortens now, as far as they are settled."""
        visible = self.prompt_lens - self.befores[layer]
        return np.flatnonzero((self.helds[layer] < visible) & ~self._thinned)

    def settle(self, index: int, keep: npt.NDArray[np.int64]) -> None:
        """The lengths of a request are solved: `keep` is `[L]`, window and sinks included.

        Raises:
            ValueError: they break the plan's promise.
        """
        plan = self.plans[index]
        assert isinstance(plan, OpenPlan), f"{self.request_ids[index]} is solved twice"
        settled = plan.settle(keep)
        self.plans[index] = settled
        self.helds[:, index] = settled.held
        self.budgets[index] = settled.budget_tokens


def _held(plan: Plan) -> IntArray:
    if isinstance(plan, OpenPlan):
        return np.full(plan.num_layers, plan.prompt_len, np.int32)
    return plan.held


@dataclass
class StepRetention:
    """One step, for all layers; built once and shared by their metadata.

    Attributes:
        skips: `[L, R]` int32 on the host, tokens below which a request's table is not valid.
        evictions: the requests that evict now, or None.
        first_queries: `[R]` int32 on the host, the position of the first query whose attention
            counts for the next eviction; None where the policy does not accumulate.
        choice: which keys are used, where V lies in host memory; else None.
        thinning: the prompts that are thinned between layers in this step, or None.
    """

    skips: IntArray
    evictions: StepEvictions | None
    first_queries: IntArray | None = None
    choice: StepChoice | None = None
    thinning: StepThinning | None = None

    @classmethod
    def nothing(cls, num_layers: int, num_reqs: int) -> StepRetention:
        """A step in which every request has its whole cache and none ends its prompt."""
        return cls(np.zeros((num_layers, num_reqs), np.int32), None)

    def report(self) -> dict[str, Eviction]:
        """What was done with each request that gives, for the scheduler."""
        if self.evictions is None:
            return {}
        evictions = self.evictions
        unsolved = set(evictions.unsolved.tolist())
        report = {}
        for i in np.flatnonzero(evictions.gives).tolist():
            plan, keep = evictions.plans[i], None
            if i in unsolved:
                assert isinstance(plan, RetentionPlan), "a prompt ended and was not solved"
                keep = tuple(plan.keep.tolist())
            report[evictions.request_ids[i]] = Eviction(
                int(evictions.tokens_done[i]), keep, evictions.numbers[i]
            )
        return report
