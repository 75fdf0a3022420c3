# SPDX-License-Identifier: Apache-2.0
"""Installed and without a policy, a vLLM process looks as it does where the package is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("inert.py")
# A line of vLLM's log, without the process's number and the time.
LOGGED = re.compile(r"\b([A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d (.*)")
OURS = "KV policy (vllm-pyramid):"


@pytest.fixture(scope="module")
def looks(random_model, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """A process with the package and one without; what they print is added as `log`."""
    from vllm_pyramid.compat.versions import runs_without_plugins

    if not runs_without_plugins():
        pytest.skip("the CUDA wheel finds no platform here without the package")
    folder = tmp_path_factory.mktemp("inert")
    # What the tests' own settings would hide.
    hidden = (
        *("HUMMING_DISABLE_PARALLEL_BUILD", "PYRAMID_CPU_PLATFORM", "THP_MEM_ALLOC_ENABLE"),
        "VLLM_PLUGINS",
    )
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    processes = {
        how: subprocess.Popen(
            [sys.executable, str(SCRIPT), how, str(random_model), str(folder / how)],
            env={**environment, "VLLM_LOGGING_LEVEL": "INFO"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for how in ("with", "without")
    }
    logs = {how: process.communicate(timeout=500)[0] for how, process in processes.items()}
    found = {}
    for how, log in logs.items():
        assert processes[how].returncode == 0, log
        found[how] = {**json.loads((folder / how).read_text()), "log": LOGGED.findall(log)}
    return found


@pytest.mark.parametrize(
    "what",
    [
        *("environment", "platform", "Ray's key", "config", "compilation", "block size", "dtype"),
        *("scheduler", "worker", "backend", "hash", "metrics", "log"),
    ],
)
def test_it_looks_the_same(looks: dict[str, dict[str, Any]], what: str) -> None:
    assert looks["without"][what]
    assert looks["with"][what] == looks["without"][what]


def test_the_help_has_one_group_more(looks: dict[str, dict[str, Any]]) -> None:
    """All other lines are vLLM's, in its order."""
    ours, stock = (looks[how]["help"].splitlines() for how in ("with", "without"))
    begin = ours.index(OURS)
    size = len(ours) - len(stock)
    group = ours[begin : begin + size]
    assert size > 10 and ours[:begin] + ours[begin + size :] == stock
    flags = re.findall(r"^  (--\S+)", "\n".join(group), re.MULTILINE)
    assert "--kv-policy" in flags and all(flag.startswith("--kv-") for flag in flags)


def test_only_light_modules_are_imported(looks: dict[str, dict[str, Any]]) -> None:
    """The time of the import: nothing of vLLM, torch or others is loaded for the plugin's sake."""
    more = set(looks["with"]["modules"]) - set(looks["without"]["modules"])
    assert "vllm_pyramid.plugin" in more
    assert not {name for name in more if not name.startswith("vllm_pyramid")}
    for heavy in ("attention", "kernels", "kv_cache", "methods", "scheduler", "step", "worker"):
        assert not {name for name in more if name.startswith(f"vllm_pyramid.{heavy}")}
