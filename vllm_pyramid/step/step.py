# SPDX-License-Identifier: Apache-2.0
"""One step of a worker: what each request has skipped, and who evicts.

`worker/eviction_tracker.py` builds it once per step, from the requests' plans; all layers share it.

Shape legend: L layers, R requests of the step, T_l tokens that layer l computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import Eviction, EvictionPoint, IntArray, Plan
from vllm_pyramid.policy.kept_spans import Spans
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.failures import Failures
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.step.step_evictions import StepEvictions

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import StepNeeds

Numbers = npt.NDArray[np.int64]


@dataclass
class WorkerRequest:
    """What a worker knows of a request; one record from its arrival to its end.

    Attributes:
        policy: the policy that the request is served with.
        plan: its plan now; a decided plan replaces an open one.
        initial: the plan that it arrived with, which holds again after a preemption.
        keep: spans of the prompt that stay in every layer and head.
        state: what methods keep of it, by the name of their hooks.
    """

    request_id: str
    policy: Policy
    plan: Plan
    initial: Plan
    keep: Spans = ()
    state: dict[str, Any] = field(default_factory=dict)


class StepLayout(Protocol):
    """Which tokens each layer computes, in steps in which these differ between layers.

    Attributes:
        query_starts: `[L, R + 1]` int32, where each request's tokens begin in a layer.
        seq_lens: `[L, R]` int32, where each request's sequence ends in a layer's table.
        skips: `[L, R]` int32, tokens below which a layer's table is not valid.
        survivors: rows of the layer that has just run which the next one computes, `[T_l+1]`
            int64; None: all of them.
    """

    survivors: torch.Tensor | None

    @property
    def query_starts(self) -> IntArray: ...

    @property
    def seq_lens(self) -> IntArray: ...

    @property
    def skips(self) -> IntArray: ...

    def slots(self, layer: int, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Return those of the step's slots, `[>= T_0]`, that the layer writes: `[T_l]`."""

    def starts_on(self, layer: int, device: torch.device) -> torch.Tensor:
        """Return `query_starts` of a layer, `[R + 1]`, on the device."""


@dataclass
class Step:
    """One step, for all layers; built once and shared by their metadata.

    Attributes:
        skips: `[L, R]` int32 on the host, tokens below which a request's table is not valid.
        evictions: the requests that come to an eviction in this step, or None.
        requests: R records, in batch order; none in a step without real requests.
        prompt_lens: `[R]` tokens of the prompts.
        computed: `[R]` tokens computed before the step. scheduled: `[R]` tokens of the step.
        eviction_numbers: `[R]` number of each request's latest eviction before the step, or 0.
        inner_evictions: `[R]` number of evictions inside the prompt.
        intervals: `[R]` tokens between two evictions behind the prompt, or 0.
        evicting: `[R]` bool, whether the request's plan ever evicts.
        layout: where layers compute different tokens; None: all compute all of the step's.
        wants_log_sum_exp: whether attention is to write its log-sum-exp, where it can.
        failures: the worker's; requests of the step that must end with an error.
    """

    skips: IntArray
    evictions: StepEvictions | None
    requests: list[WorkerRequest]
    prompt_lens: IntArray
    computed: IntArray
    scheduled: IntArray
    eviction_numbers: Numbers
    inner_evictions: Numbers
    intervals: Numbers
    evicting: npt.NDArray[np.bool_]
    layout: StepLayout | None = None
    wants_log_sum_exp: bool = False
    failures: Failures = field(default_factory=Failures)

    @classmethod
    def nothing(cls, num_layers: int, num_reqs: int) -> Step:
        """Return a step in which every request has its whole cache and none ends its prompt."""
        tokens, numbers = np.zeros(0, np.int32), np.zeros(0, np.int64)
        return cls(
            skips=np.zeros((num_layers, num_reqs), np.int32),
            evictions=None,
            requests=[],
            prompt_lens=tokens,
            computed=tokens,
            scheduled=tokens,
            eviction_numbers=numbers,
            inner_evictions=numbers,
            intervals=numbers,
            evicting=np.zeros(0, bool),
        )

    @property
    def request_ids(self) -> list[str]:
        """The R names."""
        return [request.request_id for request in self.requests]

    def add_needs(self, needs: StepNeeds) -> None:
        """Give the step what a method needs of it."""
        self.wants_log_sum_exp |= needs.wants_log_sum_exp
        if needs.layout is not None:
            if self.layout is not None:
                raise RuntimeError("two methods choose the tokens that each layer computes")
            self.layout = needs.layout

    def next_inner_eviction(self) -> Numbers:
        """Return the tokens at each request's next eviction inside its prompt, `[R]`; -1: none."""
        result = np.full(len(self.eviction_numbers), -1, np.int64)
        for row in np.flatnonzero(self.eviction_numbers < self.inner_evictions).tolist():
            plan, number = self.requests[row].plan, int(self.eviction_numbers[row]) + 1
            result[row] = plan.computed_at(number)
        return result

    def scorer_inputs(
        self, call: AttentionInputs, policy: Policy, row: int, first_query: int
    ) -> ScorerInputs | None:
        """Return a request of the step with its queries from position `first_query` on.

        None where the step has no such queries. For scorers that gather, in steps without layout.
        """
        computed, scheduled = int(self.computed[row]), int(self.scheduled[row])
        ignored = max(0, first_query - computed)
        if ignored >= scheduled:
            return None
        end = int(self.scheduled[: row + 1].sum())
        skip, block_size = int(self.skips[call.layer, row]), call.key_cache.shape[2]
        return ScorerInputs.of_request(
            call,
            policy,
            num_layers=len(self.skips),
            num_tokens=computed + scheduled - skip,
            queries=call.query[end - scheduled + ignored : end],
            block_row=call.block_table[row],
            start=skip % block_size if call.shifted else skip,
            whole=bool(self.eviction_numbers[row] == 0),
            last_position=computed + scheduled - 1,
            prompt_len=int(self.prompt_lens[row]),
        )

    def add_error(self, what: str, error: Exception, *, peers_wait: bool = False) -> None:
        """Let all requests of the step fail, for which a method's call raised `error`.

        `error` is raised as by `Failures.add_error`, in steps without requests, where layers
        compute different tokens (the layer above would not know which), and where the scheduler
        would not hear of it.
        """
        if self.layout is not None or (self.evictions is None and self.failures.reports_evictions):
            raise error
        self.failures.add_error(self.request_ids, what, error, peers_wait=peers_wait)

    def report(self) -> dict[str, Eviction]:
        """Return the step's evictions that are reported to the scheduler, by request."""
        if self.evictions is None:
            return {}
        evictions = self.evictions
        deferred = set(evictions.deferred.tolist())
        report = {}
        for index in np.flatnonzero(evictions.is_reported).tolist():
            plan, keep = evictions.plans[index], None
            if index in deferred:
                if not isinstance(plan, EvictionPoint):
                    raise RuntimeError(
                        f"request {evictions.request_ids[index]}: its prompt of "
                        f"{plan.prompt_len} tokens ended and its lengths were not decided: layers "
                        "did not run; report this"
                    )
                keep = tuple(plan.keep.tolist())
            report[evictions.request_ids[index]] = Eviction(
                int(evictions.tokens_done[index]), keep, int(evictions.eviction_numbers[index])
            )
        return report
