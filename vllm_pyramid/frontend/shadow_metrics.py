# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of answers that are compared with the whole cache (`--kv-shadow`)."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from vllm_pyramid.frontend.shadow_judge import Comparison

# Clients choose the names of applications, and each is a series of its own in Prometheus.
MAX_LABELS = 64
OTHERS = "(others)"


class ShadowMetrics:
    """The metrics of `--kv-shadow`; one object per process.

    Metrics (labels: application, cache: `evicted`, or `whole` for requests that evicted nothing):
        vllm_pyramid:shadow_requests_total          answers that were compared
        vllm_pyramid:shadow_tokens_total            their tokens, without the first one of each
        vllm_pyramid:shadow_agreed_tokens_total     those that the whole cache finds likeliest, too
        vllm_pyramid:shadow_logprob_tokens_total    tokens of answers with log probabilities
        vllm_pyramid:shadow_lost_nats_total         log probability that they lose with the whole
                                                    cache (its increases alone)

    Without `cache`:
        vllm_pyramid:shadow_full                    tenants whose application runs with the whole
                                                    cache

    Without labels but `reason`:
        vllm_pyramid:shadow_dropped_total           answers that were not compared: `queue` (full),
                                                    `busy` (the engine was never idle for long
                                                    enough), `failed`
    """

    def __init__(self) -> None:
        labels = ["application", "cache"]
        self._requests = Counter(
            "vllm_pyramid:shadow_requests", "Answers compared with the whole cache.", labels
        )
        self._tokens = Counter("vllm_pyramid:shadow_tokens", "Tokens that were compared.", labels)
        self._agreed = Counter(
            "vllm_pyramid:shadow_agreed_tokens",
            "Compared tokens that the whole cache finds likeliest, too.",
            labels,
        )
        self._with_logprobs = Counter(
            "vllm_pyramid:shadow_logprob_tokens",
            "Compared tokens whose log probabilities the client asked for.",
            labels,
        )
        self._lost = Counter(
            "vllm_pyramid:shadow_lost_nats",
            "Log probability that answers lose with the whole cache.",
            labels,
        )
        self._full = Gauge(
            "vllm_pyramid:shadow_full",
            "Tenants whose application runs with the whole cache.",
            ["application"],
            multiprocess_mode="mostrecent",
        )
        self._dropped = Counter(
            "vllm_pyramid:shadow_dropped", "Answers that could not be compared.", ["reason"]
        )
        self._names: set[str] = set()
        self._num_full: Counts[str] = Counts()

    def _label(self, application: str) -> str:
        if application not in self._names and len(self._names) >= MAX_LABELS:
            return OTHERS
        self._names.add(application)
        return application

    def add(self, application: str, comparison: Comparison, *, evicted: bool) -> None:
        """Count a comparison."""
        labels = (self._label(application), "evicted" if evicted else "whole")
        self._requests.labels(*labels).inc()
        self._tokens.labels(*labels).inc(comparison.tokens)
        self._agreed.labels(*labels).inc(comparison.agreed)
        self._with_logprobs.labels(*labels).inc(comparison.logprobs)
        self._lost.labels(*labels).inc(max(comparison.lost, 0.0))

    def count_full(self, application: str, change: int) -> None:
        """Count a tenant whose application began (1) or ceased (-1) to run with the whole cache."""
        if change:
            label = self._label(application)
            self._num_full[label] += change
            self._full.labels(label).set(self._num_full[label])

    def drop(self, reason: str) -> None:
        """Count an answer that is not compared."""
        self._dropped.labels(reason).inc()
