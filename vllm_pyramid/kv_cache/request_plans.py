# SPDX-License-Identifier: Apache-2.0
"""What requests keep: plans as they are given, and as the worker confirms them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_pyramid.kv_cache.request_record import SchedulerRequest
from vllm_pyramid.kv_cache.session_cache import Conversation
from vllm_pyramid.plan import Eviction, Plan, RetentionPlan


class RequestPlans:
    """The plans of requests, as a part of `LockstepCoordinator`.

    Attributes:
        tokens_evicted, num_evictions: see there.
    """

    num_layers: int
    tokens_evicted: npt.NDArray[np.int64]
    num_evictions: int
    _requests: dict[str, SchedulerRequest]

    def set_plan(
        self,
        request_id: str,
        plan: Plan,
        policy: str = "",
        min_tokens: int | None = None,
        shareable: int | None = 0,
        reusable: int | None = 0,
        conversation: Conversation | None = None,
    ) -> None:
        """Say what the request keeps once its prompt is processed, or that it will be solved.

        Args:
            policy, min_tokens, shareable, reusable, conversation: what the plan is of; see
                `SchedulerRequest`.
        """
        assert plan.num_layers == self.num_layers, (plan.num_layers, self.num_layers)
        due = plan.exact_tokens if plan.evicts else None
        self._requests[request_id] = SchedulerRequest(
            plan, policy, min_tokens, shareable, reusable, conversation, due=due
        )

    def plan_of(self, request_id: str) -> Plan:
        """The plan that `set_plan` was given."""
        plan = self._requests[request_id].plan
        assert plan is not None, f"{request_id} has no plan"
        return plan

    def policy_name(self, request_id: str) -> str:
        """The policy that `set_plan` was given."""
        return self._requests[request_id].policy

    def min_tokens(self, request_id: str) -> int | None:
        """The floor that `set_plan` was given."""
        return self._requests[request_id].min_tokens

    def forget_plan(self, request_id: str) -> None:
        """Drop the plan of a request that has finished."""
        if (request := self._requests.get(request_id)) is None:
            return
        request.plan = request.due = None
        if not request.num_blocks:
            del self._requests[request_id]

    def confirm(self, request_id: str, eviction: Eviction) -> None:
        """The worker reports what it evicted, and the lengths where it has solved them.

        Raises:
            RuntimeError: that is not what the plan says, or not what an open plan promised; blocks
                freed by the plan would then be blocks that the worker still reads.
        """
        request = self._requests.get(request_id)
        if request is None or request.plan is None or not request.num_blocks:
            return  # finished, or preempted while the step ran; it will evict again
        if not request.plan.evicts:
            return
        resolved, before = request.resolved, request.confirmed
        if resolved is None or eviction.keep is not None:
            resolved = _resolved(request_id, request.plan, eviction.keep)
        number = eviction.number
        gone = np.zeros_like(resolved.end.skip)
        if number > before:
            gone = resolved.skip_after(number) - resolved.skip_after(before)
        expected = int(gone.sum())
        if eviction.tokens != expected:
            raise RuntimeError(
                f"request {request_id}: the worker evicted {eviction.tokens} tokens, the plan says "
                f"{expected} at eviction {number} after {before}; scheduler and worker disagree "
                "about the KV policy; report this"
            )
        request.resolved, request.confirmed = resolved, number
        self.num_evictions += bool(expected)
        self.tokens_evicted += gone

    def confirmed_plan(self, request_id: str) -> RetentionPlan | None:
        """What the request keeps, once the worker has moved its survivors: at the prompt's end."""
        return self._known(request_id).resolved

    def confirmed_number(self, request_id: str) -> int:
        """The latest eviction for which the worker has moved the request's survivors, or 0."""
        return self._known(request_id).confirmed

    def has_evicted(self, request_id: str) -> bool:
        """Whether the request's head blocks have gone back to the pool (and not come again)."""
        return self._known(request_id).released > 0

    def _known(self, request_id: str) -> SchedulerRequest:
        return self._requests.get(request_id, SchedulerRequest())


def _resolved(request_id: str, plan: Plan, keep: tuple[int, ...] | None) -> RetentionPlan:
    try:
        return plan.resolved(keep)
    except ValueError as error:
        raise RuntimeError(
            f"request {request_id}: the worker's report cannot be followed: {error}; scheduler and "
            "worker disagree about the KV policy; report this"
        ) from error
