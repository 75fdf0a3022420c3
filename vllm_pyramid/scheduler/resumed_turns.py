# SPDX-License-Identifier: Apache-2.0
"""What a turn of a conversation resumed, and why not more: for its report, and counted by reason.

It is worked out at a request's end, from what its lookup has left, so no step pays for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.evicted_names import EvictedNames
from vllm_pyramid.plan import Plan
from vllm_pyramid.policy.request import ServedRequest
from vllm_pyramid.policy.resumed import (
    CANNOT,
    DIFFERS,
    EXACT_MODE,
    MISSING,
    PREFIX,
    RESUMED,
    SETTINGS,
    SHORT,
    UNCACHED,
    UNEVICTED,
    UNKNOWN,
    read_why,
    words_of,
)
from vllm_pyramid.scheduler.turn_ways import TurnWays


class ResumedTurns:
    """Explains what the turns of one scheduler have resumed; `counts` has ended turns by reason.

    `least_before` is the fewest tokens of a chunk that ends at a point of a request's plan.
    """

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        ways: TurnWays,
        least_before: Callable[[Plan, int], int],
        *,
        finds_prefixes: bool,
    ) -> None:
        self._coordinator, self._least_before = coordinator, least_before
        self.ways = ways
        self._finds_prefixes = finds_prefixes
        self.counts: Counter[str] = Counter()

    def of(self, request: Request, served: ServedRequest) -> tuple[str, dict[str, Any]]:
        """Return why a turn that has ended resumed no more, and what its report says of it.

        The request still holds its blocks.
        """
        resumed = self._coordinator.sessions.resumed_tokens(request.request_id)
        record = self._coordinator.plans.records[request.request_id]
        length, resuming = request.num_prompt_tokens, self.ways.resuming.get(request.request_id)
        if resuming is None:
            why = self._why(request, served, record.terms.evicted, resumed)
            words = words_of(why, length)
        else:
            terms, found, of_session = resuming
            assert terms.served is not None
            less = self._why(request, terms.served, terms.evicted, of_session)
            why = (PREFIX, found)
            words = f"{words_of(why, length)}: {words_of(less, length)}"
        said: dict[str, Any] = {
            "tokens": record.began,
            "from": "session" if resumed else "prefix" if record.began else None,
        }
        if why[0] != RESUMED:
            said["because"] = words
        return str(why[0]), said

    def _why(
        self, request: Request, served: ServedRequest, names: EvictedNames | None, resumed: int
    ) -> tuple[str | int, ...]:
        """Return the reason, and the numbers or words to it."""
        if served.why_exact:
            return CANNOT, served.why_exact
        params = request.sampling_params
        why = read_why(None if params is None else params.extra_args)
        if not self._finds_prefixes:
            return (UNCACHED,)
        if served.exact:
            return (EXACT_MODE,)
        if not served.turns and not why:
            return (UNKNOWN,)
        if why and why[0] == UNKNOWN:
            return why
        length = request.num_prompt_tokens
        points = [] if names is None else [point for point, _ in names.points if point < length]
        if not points or resumed >= points[-1]:  # as much as its own turns allow
            if why and why[0] == DIFFERS:
                return why
            return (RESUMED,) if points else (UNEVICTED,)
        if why and why[0] == SETTINGS:
            return why
        assert names is not None
        added, least = length - points[-1], self._least_before(names.plan, length)
        return (SHORT, added, least) if added < least else (MISSING, points[-1])
