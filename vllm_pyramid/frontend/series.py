# SPDX-License-Identifier: Apache-2.0
"""Make the package's Prometheus metrics; of several processes a gauge shows the latest value."""

from __future__ import annotations

from prometheus_client import Counter, Gauge


def counter(name: str, text: str, *labels: str) -> Counter:
    """Return the counter `vllm_pyramid:NAME_total`."""
    return Counter(f"vllm_pyramid:{name}", text, labels)


def gauge(name: str, text: str, *labels: str) -> Gauge:
    """Return the gauge `vllm_pyramid:NAME`."""
    return Gauge(f"vllm_pyramid:{name}", text, labels, multiprocess_mode="mostrecent")
