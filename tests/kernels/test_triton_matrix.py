# SPDX-License-Identifier: Apache-2.0
"""The modules `triton_matrix/check_*.py`, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.processes import run_python

pytestmark = pytest.mark.slow

MATRIX = Path(__file__).parent / "triton_matrix"
MODULES = (
    *("check_attention.py", "check_fp8.py", "check_mass.py", "check_moves.py", "check_pages.py"),
    *("check_recent.py", "check_scaled_rows.py", "check_scores.py", "check_topn.py"),
    *("check_lanes.py", "check_observed_expected.py", "check_page_selection.py"),
    *("check_tables.py", "check_vllm_rows.py"),
)


def run_module(name: str, interpret: bool) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(MATRIX / name)]
    how = {"TRITON_INTERPRET": "1"} if interpret else {"unset": "TRITON_INTERPRET"}
    status, out, errors = run_python(*command, **how)
    assert status == 0, out + errors
    assert "skipped" not in out, out


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
