# SPDX-License-Identifier: Apache-2.0
"""Importing the package is light, and faults can be planted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.planted_faults.faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]


def test_importing_the_package_is_light() -> None:
    """Plugins are loaded in every vLLM process: the import must not pull in an engine."""
    code = (
        "import sys, vllm_pyramid, vllm_pyramid.tools.demo\n"
        "heavy = {'vllm', 'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_up_to_date(name: str) -> None:
    for edit in FAULTS[name].edits:
        assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.old) == 1, edit
