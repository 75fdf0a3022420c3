# SPDX-License-Identifier: Apache-2.0
"""Online sampling: some requests of an application are solved, the others use their average.

XKV's online mode (arXiv:2412.05896): the budgets of one application look alike, so a sample of its
requests is enough. The scheduler alone decides, when a request arrives, and sends the shares with
it; the workers never count anything, so both sides agree.

    --kv-policy xkv --kv-policy-args '{"sample_share": 0.1}'     # every tenth request is solved
    --kv-policy xkv --kv-policy-args '{"sample_first": 20}'      # only the first twenty are

An application is a name that requests carry (`vllm_xargs`: `{"kv_application": "mail"}`), apart for
each `cache_salt`; there are 1024 at most. Until its first prompt is solved, each of its prompts is.
A response with averaged shares has `averaged_over`, the number of prompts that they are of. Which
requests are solved depends on the order of arrival, so outputs do too. Not with `retention`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import DeferredPlan, Plan, RetentionPlan
from vllm_pyramid.policy.limits import MAX_APPLICATIONS
from vllm_pyramid.step.hooks import SchedulerHooks

if TYPE_CHECKING:
    from vllm_pyramid.methods.solved import SolvingAllocator


@dataclass
class _Application:
    """`total` is `[layers]`, the sum of the shares of the `solved` requests so far."""

    total: npt.NDArray[np.float64]
    seen: int = 0
    solved: int = 0


class SampledShares(SchedulerHooks):
    """Keeps the running averages of all applications, apart for each salt.

    There are `MAX_APPLICATIONS` at most. The salt that has most of them forgets the one that it
    used least recently, so a tenant that names many applications loses its own averages.
    """

    tells_of_others = frozenset(("averaged_over",))

    def __init__(self, solver: SolvingAllocator, num_layers: int) -> None:
        assert solver.samples
        self._first, self._share = solver.sample_first, solver.sample_share
        self._num_layers = num_layers
        # By salt, then by name; the least recently used ones first.
        self._salts: OrderedDict[bytes, OrderedDict[str, _Application]] = OrderedDict()
        self._num_applications = 0
        self._of_request: dict[str, _Application] = {}  # sampled ones that are not solved yet
        self._averaged: dict[str, int] = {}  # requests with averaged shares: prompts they are of

    def on_request_added(
        self, request_id: str, salt: str, application: str, plan: Plan
    ) -> dict[str, Any] | None:
        if not plan.is_deferred:
            return None
        found = self.shares_for(request_id, salt, application)
        if found is None:
            return None
        shares, self._averaged[request_id] = found
        return {"kind": "shares", "shares": shares}

    def on_eviction(self, request_id: str, plan: Plan, resolved: RetentionPlan) -> None:
        if isinstance(plan, DeferredPlan):
            self.add(request_id, plan, resolved)

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        self._of_request.pop(request_id, None)
        prompts = self._averaged.pop(request_id, None)
        return {} if prompts is None else {"averaged_over": prompts}

    def shares_for(
        self, request_id: str, salt: str, application: str
    ) -> tuple[tuple[float, ...], int] | None:
        """Return shares, `[L]`, for a request that could be solved, and of how many prompts; None:
        solve.

        The first requests are solved, or an even sample beginning with the first one, and every
        request that comes before an average is known.
        """
        known = self._application(salt, application)
        index = known.seen
        known.seen += 1
        if known.solved == 0 or self._is_sampled(index):
            self._of_request[request_id] = known
            return None
        mean = known.total / known.solved
        return tuple(round(share, 9) for share in mean.tolist()), known.solved

    def _application(self, salt: str, name: str) -> _Application:
        key = sha256(salt.encode("utf-8", "surrogatepass")).digest()  # a salt may be long
        of_salt = self._salts.setdefault(key, OrderedDict())
        self._salts.move_to_end(key)
        if name not in of_salt:
            of_salt[name] = _Application(np.zeros(self._num_layers))
            self._num_applications += 1
        of_salt.move_to_end(name)
        if self._num_applications > MAX_APPLICATIONS:
            fullest = max(self._salts, key=lambda salt: len(self._salts[salt]))
            self._salts[fullest].popitem(last=False)
            self._num_applications -= 1
            if not self._salts[fullest]:
                del self._salts[fullest]
        return of_salt[name]

    def _is_sampled(self, index: int) -> bool:
        if self._first is not None:
            return index < self._first
        assert self._share is not None
        return index == 0 or math.floor(index * self._share) > math.floor((index - 1) * self._share)

    def add(self, request_id: str, plan: DeferredPlan, resolved: RetentionPlan) -> None:
        """Count a sampled request that was solved; again after a preemption, it counts once."""
        known = self._of_request.pop(request_id, None)
        chosen = resolved.end.keep.astype(np.float64) - plan.floor
        if known is not None and chosen.sum() > 0:
            known.total += chosen / chosen.sum()
            known.solved += 1
