# SPDX-License-Identifier: Apache-2.0
"""What a server's `/metrics` says about its KV policy, as numbers of each engine."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException

# Counters and gauges of one number, by the name that the table uses.
SIMPLE = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "evictions": "vllm_pyramid:evictions_total",
    "pool_blocks": "vllm_pyramid:pool_blocks",
    "other_blocks": "vllm_pyramid:other_blocks_held",
    "dropped_reports": "vllm_pyramid:dropped_reports_total",
    "dropped_traces": "vllm_pyramid:dropped_traces_total",
}
# Numbers of each layer, reason or level.
PARTS = {
    "blocks_held": ("vllm_pyramid:blocks_held", "layer"),
    "tokens_held": ("vllm_pyramid:tokens_held", "layer"),
    "blocks_freed": ("vllm_pyramid:blocks_freed_total", "layer"),
    "tokens_evicted": ("vllm_pyramid:tokens_evicted_total", "layer"),
    "failed": ("vllm_pyramid:failed_requests_total", "reason"),
    "by_level": ("vllm_pyramid:requests_by_level", "level"),
}
POLICY = "vllm_pyramid:policy_info"
_TIMEOUT_S = 5.0


@dataclass
class EngineSample:
    """The numbers of one engine.

    Attributes:
        policy, budget: what it was started with; None without a policy.
        values: by the names of `SIMPLE`; what the server does not export is missing.
        parts: by the names of `PARTS`, the number of each layer, reason or level.
    """

    policy: str | None = None
    budget: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return a number, or the sum of its parts; 0 where the server does not export it."""
        if name in PARTS:
            return sum(self.parts.get(name, {}).values())
        return self.values.get(name, 0.0)

    @property
    def used_blocks(self) -> float:
        """Blocks of the pool that requests hold, in all layers."""
        return self.of("blocks_held") + self.of("other_blocks")


def parse(text: str) -> dict[str, EngineSample]:
    """Return the numbers of every engine in the text of `/metrics`; ValueError: it is not that."""
    from prometheus_client.parser import text_string_to_metric_families

    simple = {metric: name for name, metric in SIMPLE.items()}
    parts = {metric: (name, label) for name, (metric, label) in PARTS.items()}
    engines: dict[str, EngineSample] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name not in simple and sample.name not in parts and sample.name != POLICY:
                continue
            engine = engines.setdefault(sample.labels.get("engine", "0"), EngineSample())
            if sample.name == POLICY:
                engine.policy, engine.budget = sample.labels["policy"], sample.labels["budget"]
            elif sample.name in simple:
                engine.values[simple[sample.name]] = sample.value
            else:
                name, label = parts[sample.name]
                engine.parts.setdefault(name, {})[sample.labels[label]] = sample.value
    return dict(sorted(engines.items(), key=lambda item: (len(item[0]), item[0])))


@dataclass
class Reading:
    """What one server answered.

    Attributes:
        url: the server's root. time: seconds, by the reader's monotonic clock.
        engines: by engine number; empty where `error` says why.
    """

    url: str
    time: float
    engines: dict[str, EngineSample] = field(default_factory=dict)
    error: str = ""


def metrics_url(url: str) -> str:
    """Return the address of a server's metrics, of `host:port`, its root, or `/metrics` itself."""
    full = url if "://" in url else f"http://{url}"
    if not full.startswith(("http://", "https://")) or not full.partition("://")[2].strip("/"):
        raise ValueError(f"{url!r} is no address of a server, such as http://localhost:8000")
    full = full.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{full}/metrics"


def read(url: str, clock: Callable[[], float]) -> Reading:
    """Ask a server; one that does not answer becomes a reading with the reason."""
    try:
        with urllib.request.urlopen(metrics_url(url), timeout=_TIMEOUT_S) as answer:
            engines = parse(answer.read().decode())
    except (OSError, ValueError, HTTPException) as error:  # refused, timed out, no metrics
        return Reading(url, clock(), error=str(error))
    if not engines:
        return Reading(url, clock(), error="no metrics of vLLM there")
    return Reading(url, clock(), engines)
