# SPDX-License-Identifier: Apache-2.0
"""The thinning stage of scripts/gpu_check.py, on the CPU: what it compares does agree there."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_thinning")


def test_thinning_stage(script: ModuleType) -> None:
    result = script.run_thinning(None, "v1", "float32", "eager")
    assert result["keeps_all_and_full"]["answers_that_part"] == 0
    formula = result["thinned_and_formula"]
    assert formula["share_of_tokens_compared"] == 1 and formula["largest_difference_nats"] < 1e-3
    assert result["blocks_in_decode"]["thins"] < result["blocks_in_decode"]["full"]
