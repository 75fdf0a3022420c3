# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted are up to date: their texts stand in the code, once each."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from lab.planted_faults.__main__ import ROOT, plant
from lab.planted_faults.faults import FAULTS, Edit, Fault

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted(name: str, tmp_path: Path) -> None:
    for file in {edit.file for edit in FAULTS[name].edits}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    plant(FAULTS[name], tmp_path)
    for edit in FAULTS[name].edits:
        changed = (tmp_path / edit.file).read_text()
        ast.parse(changed)
        assert changed != (ROOT / edit.file).read_text()


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1\n", "b = 2\n"):
        with pytest.raises(ValueError, match="and not once"):
            plant(Fault("", (Edit("part.py", old, ""),)), tmp_path)
