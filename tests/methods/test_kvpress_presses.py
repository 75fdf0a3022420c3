# SPDX-License-Identifier: Apache-2.0
"""Presses as scorers: each runs or is refused by name; `lab/tests` compares what they keep."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.methods import kvpress_presses
from vllm_pyramid.methods.kvpress_presses import PRESSES, REFUSED, _import
from vllm_pyramid.policy import Policy, load_policy

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed() -> None:
    try:
        importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("`make smollm2` installs kvpress")


def policy_of(press: str, settings: dict[str, Any], window: int = 64) -> Policy:
    scorer = {"kind": "kvpress", "press": press, "settings": settings}
    return load_policy("snapkv", 4096, {"window": window, "sinks": 4, "scorer": scorer})


def test_every_press_runs_or_is_refused_by_name(installed: None) -> None:
    package = Path(str(importlib.metadata.distribution("kvpress").locate_file("kvpress")))
    tree = ast.parse((package / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    presses = {name for name in names if name.endswith("Press")}
    assert presses == PRESSES.keys() | REFUSED.keys()
    for name, reason in REFUSED.items():
        with pytest.raises(ValueError, match=f"{name} cannot be a scorer here") as error:
            policy_of(name, {})
        assert reason in str(error.value)
    page = (ROOT / "lab" / "results" / "kvpress.md").read_text()
    for name in PRESSES:
        assert f"| `{name}` |" in page
    assert all(f"`{name}`" in page for name in REFUSED)


@pytest.mark.parametrize(
    ("press", "settings", "window", "message"),
    [
        ("SnapKV", {}, 64, r"unknown press 'SnapKV' \(did you mean 'SnapKVPress'\?\)"),
        ("SnapKVPress", {"window": 8}, 64, r"unknown setting 'window' .*you mean 'window_size'"),
        ("SnapKVPress", {}, 32, "looks at 64 queries, which the window of 32 does not have"),
        ("KnormPress", {"compression_ratio": 0.5}, 8, "compression_ratio is what kv_budget says"),
        ("KnormPress", {"x": 1}, 8, "valid settings: none"),
        ("TOVAPress", {}, 0, "`window` must be at least 1"),
    ],
)
def test_mistakes(press, settings, window, message, installed) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(press, settings, window)


def test_it_is_missing_or_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ValueError, match=r"needs kvpress: pip install --no-deps kvpress==0\.5\.5"):
        _import("knorm_press")

    class Other:
        version = "0.9.0"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Other())
    with pytest.raises(ValueError, match=r"needs kvpress 0.5.5, .* and 0.9.0 is installed"):
        _import("knorm_press")


def test_the_package_is_not_left_behind(installed: None) -> None:
    """A program that imports kvpress later gets the whole package."""
    policy_of("KnormPress", {})
    assert not [name for name in sys.modules if name.split(".")[0] == "kvpress"]


def test_a_policy_travels_as_data(installed: None) -> None:
    policy = policy_of("SnapKVPress", {"window_size": 32})
    again = Policy.model_validate(policy.as_data())
    assert again == policy and hash(again) == hash(policy)
    assert hash(again.scorer) == hash(policy.scorer)
    assert again.scorer.needs_queries and not again.scorer.needs_rotary
    assert not policy_of("KnormPress", {}).scorer.needs_queries
    assert policy_of("CapPress", {}).scorer.needs_rotary
    assert kvpress_presses.VERSION == "0.5.5"
