# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of the host cache."""

from __future__ import annotations

from typing import Any

from prometheus_client import Gauge

from vllm_pyramid.frontend.series import counter, gauge


class HostCacheMetrics:
    """The metrics of the host cache (docs/usage.md lists them); one object per process."""

    def __init__(self) -> None:
        self.counters = {
            name: counter(f"host_cache_{name}", text, "engine")
            for name, text in (
                ("queries", "Tokens looked for in the host cache."),
                ("hits", "Tokens found in the host cache."),
                ("evictions", "Bundles that had to go from the host cache."),
                ("dropped", "Bundles for which the host cache had no slot."),
            )
        }
        self.bytes = counter(
            "host_cache_bytes",
            "Bytes copied to the host cache and from it.",
            *("engine", "direction"),
        )
        self.used = _gauge("used", "Bytes of the host cache that hold something.")
        self.size = _gauge("size", "Bytes of the host cache.")
        self.file_bytes = counter(
            "host_cache_file_bytes",
            "Bytes of the host cache's files, written and read.",
            *("engine", "direction"),
        )
        self.file_failures = counter(
            "host_cache_file_failures",
            "Files of the host cache that were damaged or could not be written.",
            *("engine", "kind"),
        )
        self.file_evictions = counter(
            "host_cache_file_evictions",
            "Files that had to go from the host cache's folder.",
            "engine",
        )
        self.file_used = _gauge("file_used", "Bytes of the host cache's files.")

    def observe(self, now: dict[str, Any], before: dict[str, Any], engine: str) -> None:
        """Add the difference of two totals of an engine's scheduler to the metrics."""
        for name, found in self.counters.items():
            found.labels(engine).inc(now[name] - before.get(name, 0))
        for direction in ("stored", "loaded"):
            key = f"bytes_{direction}"
            self.bytes.labels(engine, direction).inc(now[key] - before.get(key, 0))
        self.used.labels(engine).set(now["bytes_used"])
        self.size.labels(engine).set(now["bytes"])
        if "file_bytes_used" in now:
            self._observe_files(now, before, engine)

    def _observe_files(self, now: dict[str, Any], before: dict[str, Any], engine: str) -> None:
        for direction in ("written", "read"):
            key = f"file_bytes_{direction}"
            self.file_bytes.labels(engine, direction).inc(now[key] - before.get(key, 0))
        for kind in ("damaged", "unwritten"):
            key = f"files_{kind}"
            self.file_failures.labels(engine, kind).inc(now[key] - before.get(key, 0))
        key = "file_evictions"
        self.file_evictions.labels(engine).inc(now[key] - before.get(key, 0))
        self.file_used.labels(engine).set(now["file_bytes_used"])


def _gauge(name: str, text: str) -> Gauge:
    return gauge(f"host_cache_{name}_bytes", text, "engine")
