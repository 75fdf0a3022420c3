# SPDX-License-Identifier: Apache-2.0
"""Judge a policy by answers that were compared with those of the whole cache (`--kv-shadow`)."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from vllm_pyramid.frontend.sessions import Key
from vllm_pyramid.frontend.shadow_metrics import Comparison, ShadowMetrics
from vllm_pyramid.policy.limits import MAX_APPLICATIONS

logger = init_logger(f"vllm.{__name__}")

# The comparisons that count, and how many of them and of their tokens decide.
WINDOW = 8
MIN_COMPARISONS = 4
MIN_TOKENS = 64
# The share of requests that go on with the policy at most once their application does not.
MAX_SHARE_OF_FULL = 0.1


@dataclass
class _Application:
    seen: int = 0
    runs_full: bool = False
    recent: deque[Comparison] = field(default_factory=lambda: deque(maxlen=WINDOW))
    whole: deque[Comparison] = field(default_factory=lambda: deque(maxlen=WINDOW))


def agreement(recent: deque[Comparison]) -> float | None:
    """Return the share of tokens that agree; None while there are too few to tell."""
    tokens = sum(comparison.tokens for comparison in recent)
    if len(recent) < MIN_COMPARISONS or tokens < MIN_TOKENS:
        return None
    return sum(comparison.agreed for comparison in recent) / tokens


class ShadowJudge:
    """Decides which requests are compared, and which applications run with the whole cache.

    Applications of different salts are judged apart. There are `MAX_APPLICATIONS` at most. The
    tenant that has most of them forgets the one that it used least recently, those that run with
    the policy first; a forgotten one begins with the policy again.

    Args:
        share: of the requests that can be compared, above 0 and at most 1.
        floor: the agreement below which an application runs with the whole cache; None: none does.
    """

    def __init__(self, share: float, floor: float | None, metrics: ShadowMetrics) -> None:
        self._share, self._floor, self._metrics = share, floor, metrics
        self._applications: OrderedDict[Key, _Application] = OrderedDict()

    def takes(self, key: Key) -> bool:
        """Count a request of an application; return whether it is one of the share.

        Once the application runs with the whole cache, few of its requests are: they go on with the
        policy, and show whether its answers agree again.
        """
        known = self._known(key)
        known.seen += 1
        share = min(self._share, MAX_SHARE_OF_FULL) if known.runs_full else self._share
        return math.floor(known.seen * share) > math.floor((known.seen - 1) * share)

    def runs_full(self, key: Key) -> bool:
        """Return whether an application runs with the whole cache."""
        return key in self._applications and self._applications[key].runs_full

    def add(self, key: Key, comparison: Comparison, *, evicted: bool) -> None:
        """Count a comparison; an application may change how it runs.

        Args:
            evicted: whether the request evicted anything. One that did not shows the noise floor.
        """
        known = self._known(key)
        self._metrics.add(key.name, comparison, evicted=evicted)
        if not evicted:
            known.whole.append(comparison)
            return
        known.recent.append(comparison)
        share = agreement(known.recent)
        if share is None or self._floor is None:
            return
        if not known.runs_full and share < self._floor:
            self._set(key, known, runs_full=True)
            logger.warning(
                "kv-shadow: application %r (tenant %s): %.1f %% of the tokens of its last %d "
                "answers equal the whole cache's, less than %.1f %%. Its requests now run with "
                "policy 'full'",
                *(key.name, key.tenant, 100 * share, len(known.recent), 100 * self._floor),
            )
            known.recent.clear()
        elif known.runs_full and len(known.recent) == WINDOW and share >= self._floor:
            self._set(key, known, runs_full=False)
            logger.warning(
                "kv-shadow: application %r (tenant %s): %.1f %% of the tokens of its last %d "
                "evicted answers equal the whole cache's. Its requests run with the policy again",
                *(key.name, key.tenant, 100 * share, len(known.recent)),
            )

    def restore(self, name: str | None = None, tenant: str | None = None) -> int:
        """Let applications run with the policy again, by default all; return how many did not."""
        count = 0
        for key, known in self._applications.items():
            if known.runs_full and name in (None, key.name) and tenant in (None, key.tenant):
                self._set(key, known, runs_full=False)
                known.recent.clear()
                count += 1
        return count

    def listing(self) -> list[dict[str, Any]]:
        """Return what is known of each application, for the operator."""
        return [
            {
                "application": key.name,
                "tenant": key.tenant,
                "runs_full": known.runs_full,
                "agreement": agreement(known.recent),
                "compared": len(known.recent),
                "noise_floor": agreement(known.whole),
                "floor": self._floor,
            }
            for key, known in reversed(self._applications.items())
        ]

    def _known(self, key: Key) -> _Application:
        known = self._applications.setdefault(key, _Application())
        self._applications.move_to_end(key)
        if len(self._applications) > MAX_APPLICATIONS:
            self._forget_one(key)
        return known

    def _forget_one(self, current: Key) -> None:
        """Forget an application of the tenant that has most, and not the current one."""
        counts = Counts(key.tenant for key in self._applications)
        most = max(counts.values())
        found = [key for key in self._applications if counts[key.tenant] == most and key != current]
        gone = next((key for key in found if not self._applications[key].runs_full), found[0])
        self._set(gone, self._applications[gone], runs_full=False)
        del self._applications[gone]

    def _set(self, key: Key, known: _Application, *, runs_full: bool) -> None:
        self._metrics.count_full(key.name, int(runs_full) - int(known.runs_full))
        known.runs_full = runs_full
