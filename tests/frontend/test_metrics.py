# SPDX-License-Identifier: Apache-2.0
"""Counters of several engines: each has its own, whatever the order of their messages."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from prometheus_client import REGISTRY


def _totals(evictions: int, layers: list[int], held: list[int]) -> dict[str, Any]:
    return {
        "evictions": evictions,
        "tokens_evicted": [16 * blocks for blocks in layers],
        "blocks_freed": layers,
        "tokens_held": [16 * blocks for blocks in held],
        "blocks_held": held,
    }


def test_replicas_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_pyramid.frontend import metrics

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines(logging.INFO)
    one, two = 100, 101  # no engine of another test
    served = {"pool_blocks": 99, "policy": ["snapkv", "12%"], "turns": {"resumed": 3, "differs": 1}}
    served |= {"avoided_preemptions": 2, "requests_by_level": {"whole": 3, "lowest": 1}}
    steps = [
        (one, None, {**_totals(1, [2, 3], [4, 4]), **served}),
        (two, None, _totals(5, [6, 7], [1, 0])),
        (one, _totals(1, [2, 3], [4, 4]), _totals(2, [4, 6], [0, 0])),
        (two, _totals(5, [6, 7], [1, 0]), _totals(6, [7, 9], [2, 1])),
    ]
    metrics.observe({"now": _totals(0, [0, 0], [0, 0]), "before": None}, one)
    # Both are due, however long this process has counted for engines of other tests.
    monkeypatch.setattr(metrics._METRICS, "_started", time.monotonic() - metrics.LOG_INTERVAL_S)
    monkeypatch.setattr(metrics._METRICS, "_next_log", {})
    level = metrics.logger.level
    metrics.logger.setLevel(logging.INFO)  # an attribute alone would leave what it remembers
    metrics.logger.addHandler(handler)
    try:
        for engine, before, now in steps:
            metrics.observe({"now": now, "before": before}, engine)
    finally:
        metrics.logger.removeHandler(handler)
        metrics.logger.setLevel(level)

    def value(name: str, engine: int, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm_pyramid:{name}", {"engine": str(engine), **labels})

    assert [value("evictions_total", engine) for engine in (one, two)] == [2, 6]
    for layer, freed in enumerate([(4, 7), (6, 9)]):
        for engine, blocks in zip((one, two), freed, strict=True):
            assert value("blocks_freed_total", engine, layer=str(layer)) == blocks
            assert value("tokens_evicted_total", engine, layer=str(layer)) == 16 * blocks
    assert value("pool_blocks", one) == 99 and value("pool_blocks", two) is None
    assert value("policy_info", one, policy="snapkv", budget="12%") == 1
    assert value("avoided_preemptions_total", one) == 2
    assert [value("requests_by_level", one, level=name) for name in ("whole", "lowest")] == [3, 1]
    assert [value("blocks_held", two, layer=layer) for layer in "01"] == [2, 1]
    assert [value("tokens_held", one, layer=layer) for layer in "01"] == [0, 0]
    # The first engine's line does not keep the second one's away.
    assert [line.split(":")[0] for line in lines] == ["Engine 100", "Engine 101"]


def test_the_host_cache_counts_differences() -> None:
    from vllm_pyramid.frontend import metrics

    names = ("queries", "hits", "evictions", "dropped", "bytes_stored", "bytes_loaded")
    of_files = ("file_bytes_written", "file_bytes_read", "files_damaged", "files_unwritten")

    def totals(number: int) -> dict[str, Any]:
        host = {name: number * (index + 1) for index, name in enumerate(names)}
        host |= {"bytes_used": 10 * number, "bytes": 1000}
        host |= {name: number * (index + 1) for index, name in enumerate(of_files)}
        host |= {"file_evictions": number, "file_bytes_used": 20 * number}
        return {**_totals(0, [0], [0]), "host_cache": host}

    engine = 102
    metrics.observe({"now": totals(1), "before": None}, engine)
    metrics.observe({"now": totals(4), "before": totals(3)}, engine)

    def value(name: str, **labels: str) -> float | None:
        full = f"vllm_pyramid:host_cache_{name}"
        return REGISTRY.get_sample_value(full, {"engine": str(engine), **labels})

    assert [value(f"{name}_total") for name in names[:4]] == [2, 4, 6, 8]
    assert value("bytes_total", direction="stored") == 10
    assert value("bytes_total", direction="loaded") == 12
    assert (value("used_bytes"), value("size_bytes")) == (40, 1000)
    assert value("file_bytes_total", direction="written") == 2
    assert value("file_bytes_total", direction="read") == 4
    assert value("file_failures_total", kind="damaged") == 6
    assert value("file_failures_total", kind="unwritten") == 8
    assert (value("file_evictions_total"), value("file_used_bytes")) == (2, 80)
