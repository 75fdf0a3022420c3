# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of the host cache."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge


class HostCacheMetrics:
    """The metrics of the host cache; one object per process.

    Metrics (label: engine):
        vllm_pyramid:host_cache_queries_total    tokens that requests looked for in the host cache
        vllm_pyramid:host_cache_hits_total       tokens that they found there
        vllm_pyramid:host_cache_bytes_total      bytes copied (and the label direction: `stored` to
                                                 the host, `loaded` from it)
        vllm_pyramid:host_cache_evictions_total  bundles that had to go from the host
        vllm_pyramid:host_cache_dropped_total    bundles for which there was no slot
        vllm_pyramid:host_cache_used_bytes       bytes that hold something now
        vllm_pyramid:host_cache_size_bytes       bytes that can
    """

    def __init__(self) -> None:
        self.counters = {
            name: Counter(f"vllm_pyramid:host_cache_{name}", text, ["engine"])
            for name, text in (
                ("queries", "Tokens looked for in the host cache."),
                ("hits", "Tokens found in the host cache."),
                ("evictions", "Bundles that had to go from the host cache."),
                ("dropped", "Bundles for which the host cache had no slot."),
            )
        }
        self.bytes = Counter(
            "vllm_pyramid:host_cache_bytes",
            "Bytes copied to the host cache and from it.",
            ["engine", "direction"],
        )
        self.used = _gauge("used", "Bytes of the host cache that hold something.")
        self.size = _gauge("size", "Bytes of the host cache.")

    def observe(self, now: dict[str, Any], before: dict[str, Any], engine: str) -> None:
        """Add the difference of two totals of an engine's scheduler to the metrics."""
        for name, counter in self.counters.items():
            counter.labels(engine).inc(now[name] - before.get(name, 0))
        for direction in ("stored", "loaded"):
            key = f"bytes_{direction}"
            self.bytes.labels(engine, direction).inc(now[key] - before.get(key, 0))
        self.used.labels(engine).set(now["bytes_used"])
        self.size.labels(engine).set(now["bytes"])


def _gauge(name: str, text: str) -> Gauge:
    full = f"vllm_pyramid:host_cache_{name}_bytes"
    return Gauge(full, text, ["engine"], multiprocess_mode="mostrecent")
