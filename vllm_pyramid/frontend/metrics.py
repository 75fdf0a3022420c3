# SPDX-License-Identifier: Apache-2.0
"""Counters of what was evicted, in Prometheus and in the log, from the scheduler's statistics."""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger

from vllm_pyramid.frontend.host_metrics import HostCacheMetrics
from vllm_pyramid.frontend.series import counter, gauge
from vllm_pyramid.policy.resumed import REASONS
from vllm_pyramid.step.failures import KINDS

logger = init_logger(f"vllm.{__name__}")

LOG_INTERVAL_S = 10.0  # vLLM's own statistics are logged this often

# Reasons that are shown from the start, with 0.
_REASONS = {"failed_requests": KINDS, "turns": REASONS}


class PolicyMetrics:
    """The Prometheus metrics (docs/usage.md lists them) and the log line; one object a process."""

    def __init__(self) -> None:
        self.evictions = counter(
            "evictions",
            "Evictions, of prompts and later ones; those repeated after a preemption count again.",
            "engine",
        )
        self.counters = {
            name: counter(name, text, "engine", "layer")
            for name, text in (
                ("tokens_evicted", "Tokens given back per KV head."),
                ("blocks_freed", "Blocks that eviction gave back to the pool."),
            )
        }
        self.gauges = {
            name: gauge(name, text, "engine", "layer")
            for name, text in (
                ("tokens_held", "Tokens held in the KV cache per KV head."),
                ("blocks_held", "Blocks of the pool in use."),
            )
        }
        self.of_pool = {
            name: gauge(name, text, "engine")
            for name, text in (
                ("other_blocks_held", "Blocks of the pool in use by layers that do not evict."),
                ("pool_blocks", "Blocks of the pool, of all pipeline stages."),
            )
        }
        self.policy = gauge(
            "policy_info",
            "The policy and the budget that the server was started with.",
            *("engine", "policy", "budget"),
        )
        self.by_level = gauge(
            "requests_by_level",
            "Running requests that orders can evict, by the level to which they were evicted.",
            *("engine", "level"),
        )
        self.v_bytes = counter(
            "v_bytes",
            "Bytes of V written to host memory, and of its rows that attention read there.",
            *("engine", "direction"),
        )
        self.totals = {
            name: counter(name, text, "engine")
            for name, text in (
                ("pages_read", "Pages of the KV cache that generated tokens read."),
                ("pages_visible", "Pages that they would have read with attention to everything."),
                ("ordered_evictions", "Evictions ordered because the pool lacked blocks."),
                ("ordered_to_floor", "Ordered evictions to the policy's budget."),
                ("ordered_loss", "Shares of their scores that prompts lost by these, summed up."),
                (
                    "avoided_preemptions",
                    "Steps for which running requests lacked blocks until orders.",
                ),
            )
        }
        self.by_reason = {
            name: counter(name, text, "engine", "reason")
            for name, text in (
                ("failed_requests", "Requests that the KV policy ended with an error."),
                ("turns", "Turns of conversations, by what they resumed."),
                ("handed", "Requests with a ticket of another engine, by what came of it."),
            )
        }
        self.dropped = {
            name: counter(name, text, "engine")
            for name, text in (
                ("dropped_traces", "Traces of kept positions that could not be written."),
                ("dropped_reports", "Reports of what requests kept that could not be sent."),
            )
        }
        self.host_cache = HostCacheMetrics()
        self._logged: dict[int, dict[str, Any]] = {}
        self._started = time.monotonic()
        self._next_log: dict[int, float] = {}  # by engine, so that each logs its own lines

    def observe(self, message: dict[str, Any], engine: int) -> None:
        """Add a message of the scheduler to the metrics.

        Args:
            message: `now` and `before`, totals since the start; `before` is None in the first one.
                Their difference is added, because other front ends may have got the messages in
                between.
        """
        now: dict[str, Any] = message["now"]
        before: dict[str, Any] = message["before"] or {}
        label = str(engine)
        layers = now.get("layers") or range(len(now["blocks_held"]))
        self.evictions.labels(label).inc(now["evictions"] - before.get("evictions", 0))
        for name, by_layer in self.counters.items():
            if now[name] == before.get(name):
                continue
            earlier = before.get(name) or [0] * len(now[name])
            for layer, count, old in zip(layers, now[name], earlier, strict=True):
                by_layer.labels(label, str(layer)).inc(count - old)
        for name, by_reason in self.by_reason.items():
            found, earlier = now.get(name, {}), before.get(name, {})
            for reason in _REASONS.get(name, found):
                more = found.get(reason, 0) - earlier.get(reason, 0)
                by_reason.labels(label, reason).inc(more)
        for name, dropped in self.dropped.items():
            dropped.labels(label).inc(now.get(name, 0) - before.get(name, 0))
        for direction in ("written", "read"):
            key = f"v_bytes_{direction}"
            if key in now:
                self.v_bytes.labels(label, direction).inc(now[key] - before.get(key, 0))
        for name, total in self.totals.items():
            if name in now:
                total.labels(label).inc(now[name] - before.get(name, 0))
        for name, held in self.gauges.items():
            for layer, value in zip(layers, now[name], strict=True):
                held.labels(label, str(layer)).set(value)
        for name, blocks in self.of_pool.items():
            if name in now:
                blocks.labels(label).set(now[name])
        if "policy" in now:
            self.policy.labels(label, *now["policy"]).set(1)
        for level, count in now.get("requests_by_level", {}).items():
            self.by_level.labels(label, level).set(count)
        if "host_cache" in now:
            self.host_cache.observe(now["host_cache"], before.get("host_cache", {}), label)
        self._log(now, engine)

    def _log(self, stats: dict[str, Any], engine: int) -> None:
        now = time.monotonic()
        before = self._logged.get(engine)
        due = self._next_log.get(engine, self._started + LOG_INTERVAL_S)
        if now < due or (before and before["evictions"] == stats["evictions"]):
            return
        self._next_log[engine] = now + LOG_INTERVAL_S
        self._logged[engine] = stats
        held = stats["blocks_held"]
        logger.info(
            "Engine %03d: KV policy: %d evictions, %d tokens and %d blocks given back over "
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


def observe(message: dict[str, Any], engine: int) -> None:
    """Feed the process's only `PolicyMetrics`: Prometheus names are global."""
    global _METRICS
    if _METRICS is None:
        _METRICS = PolicyMetrics()
    _METRICS.observe(message, engine)
