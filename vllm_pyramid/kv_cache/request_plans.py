# SPDX-License-Identifier: Apache-2.0
"""The records of all requests, and their plans as given and as the worker confirms them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm_pyramid.kv_cache.cache_store import RequestTerms, SchedulerRequest
from vllm_pyramid.kv_cache.counters import CacheCounters
from vllm_pyramid.plan import Eviction, Plan, RetentionPlan


class RequestPlans:
    """What every request keeps: the requests' records, by request id."""

    def __init__(self, counters: CacheCounters) -> None:
        self._counters = counters
        self.records: dict[str, SchedulerRequest] = {}

    def add(self, request_id: str, terms: RequestTerms) -> None:
        """Begin a request's record; its plan says what it keeps once its prompt is processed."""
        plan, num_layers = terms.plan, self._counters.num_tables
        assert plan is None or plan.num_layers == num_layers, (plan, num_layers)
        self.records[request_id] = SchedulerRequest.at_start(terms)

    def restart(self, request_id: str) -> None:
        """Forget a request's progress: it holds no blocks any more; its terms stay."""
        terms = self.records[request_id].terms
        if terms.plan is None:
            del self.records[request_id]
        else:
            self.records[request_id] = SchedulerRequest.at_start(terms)

    def forget(self, request_id: str) -> None:
        """Drop the plan of a request that has finished."""
        if (record := self.records.get(request_id)) is None:
            return
        if not record.num_blocks:
            del self.records[request_id]
            return
        record.terms, record.plan, record.next_release_at = (
            replace(record.terms, plan=None),
            None,
            None,
        )

    def of(self, request_id: str) -> Plan:
        """Return the plan that the request follows."""
        plan = self.records[request_id].plan
        assert plan is not None, f"{request_id} has no plan"
        return plan

    def confirm(self, request_id: str, eviction: Eviction) -> None:
        """Record what the worker evicted, and the lengths if the worker has decided them.

        RuntimeError: the report differs from the plan, or from what a deferred plan promised. The
        plan would then free blocks that the worker still reads.
        """
        record = self.records.get(request_id)
        if record is None or not record.num_blocks:
            return  # finished, or preempted while the step ran; it will evict again
        plan = record.plan
        if plan is None or not plan.evicts:
            return
        resolved, before = record.resolved, record.confirmed
        if resolved is None or eviction.keep is not None or record.is_ordered:
            resolved = _resolve(request_id, plan, eviction.keep)
        number = eviction.number
        evicted = np.zeros_like(resolved.end.skip)
        if number > before:
            evicted = resolved.skip_after(number) - resolved.skip_after(before)
        expected = int(evicted.sum())
        if eviction.tokens != expected:
            raise RuntimeError(
                f"request {request_id}: the worker evicted {eviction.tokens} tokens, the plan says "
                f"{expected} at eviction {number} after {before}; scheduler and worker disagree "
                "about the KV policy; report this"
            )
        record.resolved, record.confirmed = resolved, number
        if record.is_ordered:
            record.next_release_at = plan.prompt_len
        self._counters.num_evictions += bool(expected)
        self._counters.tokens_evicted += evicted

    def order(self, request_id: str, plan: RetentionPlan) -> None:
        """Let a request follow another plan: the workers evict to it before the next step."""
        self.records[request_id].plan = plan

    def confirmed(self, request_id: str) -> RetentionPlan | None:
        """Return the plan by which the worker moved the request's survivors; None before that."""
        record = self.records.get(request_id)
        return None if record is None else record.resolved

    def confirmed_number(self, request_id: str) -> int:
        """Return the latest eviction for which the worker moved the survivors, or 0."""
        record = self.records.get(request_id)
        return 0 if record is None else record.confirmed

    def has_evicted(self, request_id: str) -> bool:
        """Return whether the request's head blocks have gone back to the pool."""
        record = self.records.get(request_id)
        return record is not None and record.released > 0

    def next_release(
        self, request_id: str, record: SchedulerRequest, processed: int
    ) -> tuple[RetentionPlan, int]:
        """Return the plan and the eviction by which a head may go now.

        RuntimeError: the worker had to evict by now and has not reported that it did.
        """
        plan, resolved, confirmed = record.plan, record.resolved, record.confirmed
        assert plan is not None
        if resolved is None and isinstance(plan, RetentionPlan):
            resolved = plan  # perhaps it had nothing to give yet, and so nothing to report
        if resolved is not None:
            number = resolved.evictions_by(processed)
            skip = resolved.skip_after(number)
            if number <= confirmed or (skip == resolved.skip_after(confirmed)).all():
                return resolved, number
        raise RuntimeError(
            f"request {request_id}: {processed} of its tokens are processed but the worker did not "
            f"evict (its prompt has {plan.prompt_len} tokens, and its latest eviction was number "
            f"{confirmed}). Eviction was asked for and did not happen, so the engine stops; start "
            "with --enforce-eager to rule out captured graphs, and report this"
        )


def _resolve(request_id: str, plan: Plan, keep: tuple[int, ...] | None) -> RetentionPlan:
    try:
        return plan.resolved(keep)
    except ValueError as error:
        raise RuntimeError(
            f"request {request_id}: the worker's report cannot be followed: {error}; scheduler and "
            "worker disagree about the KV policy; report this"
        ) from error
