# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard and the alert rules ask for metrics and labels that a server registers."""

from __future__ import annotations

import ast
import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "grafana"
METRIC = re.compile(r"\bvllm(?:_pyramid)?:\w+")
# Labels that Prometheus adds when it reads, and those of histograms.
ADDED = {"instance", "job", "le"}


@cache
def ours() -> dict[str, set[str]]:
    """The metrics that `PolicyMetrics` registers, as they are exported, with their labels."""
    from prometheus_client import Counter

    from vllm_pyramid.frontend import metrics

    keys = ("tokens_evicted", "blocks_freed", "tokens_held", "blocks_held")
    none = {key: [0] for key in keys}
    metrics.observe({"now": {"evictions": 0, "layers": [0], **none}, "before": None}, 900)
    assert metrics._METRICS is not None
    found: dict[str, set[str]] = {}
    for value in vars(metrics._METRICS).values():
        for metric in value.values() if isinstance(value, dict) else [value]:
            if hasattr(metric, "_labelnames"):
                suffix = "_total" if isinstance(metric, Counter) else ""
                found[metric._name + suffix] = set(metric._labelnames)
    return found


@cache
def of_vllm() -> set[str]:
    """The names in vLLM's own logger, as they are exported."""
    from vllm.v1.metrics import loggers

    names = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(loggers)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    plain = {name for name in names if name.startswith("vllm:")}
    return {f"{name}{suffix}" for name in plain for suffix in ("", "_total", "_bucket")}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    return read


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    """All queries, by where they stand."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["query"]["query"]
    return found


def wrong(query: str) -> list[str]:
    """What a query asks for that no server exports."""
    found = []
    labels: set[str] = set()
    for name in METRIC.findall(query):
        if name.startswith("vllm_pyramid:"):
            if name not in ours():
                found.append(name)
            labels |= ours().get(name, set())
        elif name not in of_vllm():
            found.append(name)
        else:
            labels |= {"engine", "model_name"}
    for names in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", query):
        asked = {name.strip() for name in names.split(",")}
        found += sorted(asked - labels - ADDED)
    return found


@pytest.mark.parametrize("place", queries())
def test_a_query_asks_for_what_there_is(place: str) -> None:
    query = queries()[place]
    assert wrong(query) == []
    assert METRIC.search(query) or query.startswith("up{")
    assert all(query.count(pair[0]) == query.count(pair[1]) for pair in ("()", "{}", "[]"))


def test_names_that_no_server_exports_are_found() -> None:
    assert wrong("rate(vllm_pyramid:evictions[5m])") == ["vllm_pyramid:evictions"]
    assert wrong("vllm:num_requests_sleeping") == ["vllm:num_requests_sleeping"]
    assert wrong("sum by (layer) (vllm_pyramid:evictions_total)") == ["layer"]


def test_every_metric_of_ours_is_drawn() -> None:
    drawn = {name for query in queries().values() for name in METRIC.findall(query)}
    assert set(ours()) <= drawn
