# SPDX-License-Identifier: Apache-2.0
"""Counters that show what was evicted: in Prometheus and in the log. Reads, never decides.

They live in the front end (the process that answers `/metrics`) and are fed with the scheduler's
statistics of every step.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

LOG_INTERVAL_S = 10.0  # vLLM's own statistics are logged this often


class PolicyMetrics:
    """The Prometheus side; one object a process.

    Metrics (labels: engine, layer):
        vllm_pyramid:evictions_total         prompts evicted (no layer label)
        vllm_pyramid:tokens_evicted_total    tokens given back
        vllm_pyramid:blocks_freed_total      blocks given back to the pool by eviction
        vllm_pyramid:tokens_held             tokens in the cache now
        vllm_pyramid:blocks_held             blocks of the pool in use now
    """

    def __init__(self) -> None:
        layer = ["engine", "layer"]
        self.evictions = Counter(
            "vllm_pyramid:evictions", "Prompts whose KV cache was evicted.", ["engine"]
        )
        self.counters = {
            "tokens_evicted": Counter(
                "vllm_pyramid:tokens_evicted", "Tokens given back per KV head.", layer
            ),
            "blocks_freed": Counter(
                "vllm_pyramid:blocks_freed", "Blocks that eviction gave back to the pool.", layer
            ),
        }
        self.gauges = {
            "tokens_held": Gauge(
                "vllm_pyramid:tokens_held",
                "Tokens held in the KV cache per KV head.",
                layer,
                multiprocess_mode="mostrecent",
            ),
            "blocks_held": Gauge(
                "vllm_pyramid:blocks_held",
                "Blocks of the pool in use.",
                layer,
                multiprocess_mode="mostrecent",
            ),
        }
        self._last: dict[int, dict[str, Any]] = {}
        self._logged: dict[int, dict[str, Any]] = {}
        self._next_log = time.monotonic() + LOG_INTERVAL_S

    def observe(self, stats: dict[str, Any], engine: int) -> None:
        """Take the totals of one step (see `PyramidSchedulerMixin.policy_stats`)."""
        last = self._last.get(engine)
        changes = ("evictions", "blocks_held")  # the token gauges move with every step: too often
        if last is not None and all(stats[name] == last[name] for name in changes):
            return
        label = str(engine)
        self.evictions.labels(label).inc(stats["evictions"] - (last or {}).get("evictions", 0))
        for name, counter in self.counters.items():
            before = (last or {}).get(name)
            if stats[name] == before:
                continue
            for layer, total in enumerate(stats[name]):
                counter.labels(label, str(layer)).inc(total - (before[layer] if before else 0))
        for name, gauge in self.gauges.items():
            if last is None or stats[name] != last[name]:
                for layer, value in enumerate(stats[name]):
                    gauge.labels(label, str(layer)).set(value)
        self._last[engine] = stats
        self._log(stats, engine)

    def _log(self, stats: dict[str, Any], engine: int) -> None:
        now = time.monotonic()
        before = self._logged.get(engine)
        if now < self._next_log or (before and before["evictions"] == stats["evictions"]):
            return
        self._next_log = now + LOG_INTERVAL_S
        self._logged[engine] = stats
        held = stats["blocks_held"]
        logger.info(
            "Engine %03d: KV policy: %d prompts evicted, %d tokens and %d blocks given back over "
            "%d layers; blocks held now: %d (first layer %d, last layer %d)",
            engine,
            stats["evictions"],
            sum(stats["tokens_evicted"]),
            sum(stats["blocks_freed"]),
            len(held),
            sum(held),
            held[0],
            held[-1],
        )


_METRICS: PolicyMetrics | None = None


def observe(stats: dict[str, Any], engine: int) -> None:
    """Feed the process's `PolicyMetrics`, made on first use (Prometheus names are global)."""
    global _METRICS
    if _METRICS is None:
        _METRICS = PolicyMetrics()
    _METRICS.observe(stats, engine)
