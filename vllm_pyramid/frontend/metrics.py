# SPDX-License-Identifier: Apache-2.0
"""Counters of what was evicted, in Prometheus and in the log, from the scheduler's statistics."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger

from vllm_pyramid.policy.resumed import REASONS
from vllm_pyramid.step.failures import KINDS

logger = init_logger(f"vllm.{__name__}")

LOG_INTERVAL_S = 10.0  # vLLM's own statistics are logged this often

# The metrics by name, which is the key of their numbers (docs/usage.md lists them). The host
# cache's own numbers have `host_cache_` before their keys.
_COUNTERS = {
    "evictions": "Evictions, of prompts and later ones; those repeated after a preemption count "
    "again.",
    "pages_read": "Pages of the KV cache that generated tokens read.",
    "pages_visible": "Pages that they would have read with attention to everything.",
    "ordered_evictions": "Evictions ordered because the pool lacked blocks.",
    "ordered_to_floor": "Ordered evictions to the policy's budget.",
    "ordered_loss": "Shares of their scores that prompts lost by these, summed up.",
    "avoided_preemptions": "Steps for which running requests lacked blocks until orders.",
    "host_cache_queries": "Tokens looked for in the host cache.",
    "host_cache_hits": "Tokens found in the host cache.",
    "host_cache_evictions": "Bundles that had to go from the host cache.",
    "host_cache_dropped": "Bundles for which the host cache had no slot.",
    "host_cache_file_evictions": "Files that had to go from the host cache's folder.",
}
# Shown from the start, with 0.
_DROPPED = {
    "dropped_traces": "Traces of kept positions that could not be written.",
    "dropped_reports": "Reports of what requests kept that could not be sent.",
}
_BY_LAYER = {
    "tokens_evicted": "Tokens given back per KV head.",
    "blocks_freed": "Blocks that eviction gave back to the pool.",
}
_BY_REASON = {
    "failed_requests": "Requests that the KV policy ended with an error.",
    "turns": "Turns of conversations, by what they resumed.",
    "handed": "Requests with a ticket of another engine, by what came of it.",
}
# Reasons that are shown from the start, with 0.
_REASONS = {"failed_requests": KINDS, "turns": REASONS}
# Name, label, text, and the keys by the label's values.
_BY_KEY = (
    (
        *("v_bytes", "direction"),
        "Bytes of V written to host memory, and of its rows that attention read there.",
        {"written": "v_bytes_written", "read": "v_bytes_read"},
    ),
    (
        *("host_cache_bytes", "direction"),
        "Bytes copied to the host cache and from it.",
        {"stored": "host_cache_bytes_stored", "loaded": "host_cache_bytes_loaded"},
    ),
    (
        *("host_cache_file_bytes", "direction"),
        "Bytes of the host cache's files, written and read.",
        {"written": "host_cache_file_bytes_written", "read": "host_cache_file_bytes_read"},
    ),
    (
        *("host_cache_file_failures", "kind"),
        "Files of the host cache that were damaged or could not be written.",
        {"damaged": "host_cache_files_damaged", "unwritten": "host_cache_files_unwritten"},
    ),
)
_HELD_BY_LAYER = {
    "tokens_held": "Tokens held in the KV cache per KV head.",
    "blocks_held": "Blocks of the pool in use.",
}
_GAUGES = {
    "other_blocks_held": "Blocks of the pool in use by layers that do not evict.",
    "pool_blocks": "Blocks of the pool, of all pipeline stages.",
    "host_cache_used_bytes": "Bytes of the host cache that hold something.",
    "host_cache_size_bytes": "Bytes of the host cache.",
    "host_cache_file_used_bytes": "Bytes of the host cache's files.",
}
# The keys of gauges that are not their names.
_KEYS = {
    "host_cache_used_bytes": "host_cache_bytes_used",
    "host_cache_size_bytes": "host_cache_bytes",
    "host_cache_file_used_bytes": "host_cache_file_bytes_used",
}


def counter(name: str, text: str, *labels: str) -> Counter:
    """Return the counter `vllm_pyramid:NAME_total`."""
    return Counter(f"vllm_pyramid:{name}", text, labels)


def gauge(name: str, text: str, *labels: str) -> Gauge:
    """Return the gauge `vllm_pyramid:NAME`."""
    return Gauge(f"vllm_pyramid:{name}", text, labels, multiprocess_mode="mostrecent")


class PolicyMetrics:
    """The Prometheus metrics and the log line; one object a process."""

    def __init__(self) -> None:
        def counters(texts: dict[str, str], *labels: str) -> dict[str, Counter]:
            return {name: counter(name, text, "engine", *labels) for name, text in texts.items()}

        self.counters = counters(_COUNTERS)
        self.dropped = counters(_DROPPED)
        self.by_layer = counters(_BY_LAYER, "layer")
        self.by_reason = counters(_BY_REASON, "reason")
        self.by_key = {
            name: counter(name, text, "engine", label) for name, label, text, _ in _BY_KEY
        }
        self.held = {
            name: gauge(name, text, "engine", "layer") for name, text in _HELD_BY_LAYER.items()
        }
        self.gauges = {name: gauge(name, text, "engine") for name, text in _GAUGES.items()}
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
        now, before = _with_host_cache(message["now"]), _with_host_cache(message["before"] or {})
        label = str(engine)

        def more(key: str) -> Any:
            return now.get(key, 0) - before.get(key, 0)

        for name, metric in self.counters.items():
            if name in now:
                metric.labels(label).inc(more(name))
        for name, metric in self.dropped.items():
            metric.labels(label).inc(more(name))
        layers = now.get("layers") or range(len(now["blocks_held"]))
        for name, metric in self.by_layer.items():
            if now[name] == before.get(name):
                continue
            earlier = before.get(name) or [0] * len(now[name])
            for layer, count, old in zip(layers, now[name], earlier, strict=True):
                metric.labels(label, str(layer)).inc(count - old)
        for name, metric in self.by_reason.items():
            found, earlier = now.get(name, {}), before.get(name, {})
            for reason in _REASONS.get(name, found):
                metric.labels(label, reason).inc(found.get(reason, 0) - earlier.get(reason, 0))
        for name, _, _, keys in _BY_KEY:
            for value, key in keys.items():
                if key in now:
                    self.by_key[name].labels(label, value).inc(more(key))
        for name, held in self.held.items():
            for layer, value in zip(layers, now[name], strict=True):
                held.labels(label, str(layer)).set(value)
        for name, shown in self.gauges.items():
            if (key := _KEYS.get(name, name)) in now:
                shown.labels(label).set(now[key])
        if "policy" in now:
            self.policy.labels(label, *now["policy"]).set(1)
        for level, count in now.get("requests_by_level", {}).items():
            self.by_level.labels(label, level).set(count)
        self._log(message["now"], engine)

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


def _with_host_cache(totals: dict[str, Any]) -> dict[str, Any]:
    """Return totals whose host cache counters are at the top level, `host_cache_NAME`."""
    own = totals.get("host_cache", {}).items()
    return {**totals, **{f"host_cache_{key}": value for key, value in own}}


_METRICS: PolicyMetrics | None = None


def observe(message: dict[str, Any], engine: int) -> None:
    """Feed the process's only `PolicyMetrics`: Prometheus names are global."""
    global _METRICS
    if _METRICS is None:
        _METRICS = PolicyMetrics()
    _METRICS.observe(message, engine)
