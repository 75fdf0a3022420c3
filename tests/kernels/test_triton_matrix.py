# SPDX-License-Identifier: Apache-2.0
"""The modules `triton_matrix/check_*.py`, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MATRIX = Path(__file__).parent / "triton_matrix"
MODULES = (
    *("check_attention.py", "check_fp8.py", "check_mass.py", "check_moves.py", "check_pages.py"),
    *("check_recent.py", "check_scaled_rows.py", "check_scores.py", "check_topn.py"),
    *("check_lanes.py", "check_observed_expected.py", "check_page_selection.py"),
    *("check_tables.py", "check_vllm_rows.py"),
)


def run_module(name: str, interpret: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(MATRIX / name)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout


@pytest.mark.cpu
def test_every_module_is_run() -> None:
    assert {path.name for path in MATRIX.glob("check_*.py")} == {*MODULES, "check_launch.py"}


@pytest.mark.cpu
@pytest.mark.parametrize("name", MODULES)
def test_interpreted(name: str) -> None:
    run_module(name, interpret=True)


@pytest.mark.cpu
def test_launchers_offline() -> None:
    run_module("check_launch.py", interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
def test_compiled(name: str) -> None:
    run_module(name, interpret=False)
