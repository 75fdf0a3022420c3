# SPDX-License-Identifier: Apache-2.0
"""Tests of engines do not start on a GPU by accident; every run draws examples of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import platforms

import conftest


class Item:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


@pytest.fixture(autouse=True)
def forget() -> Any:
    conftest.taken_by_gpu.cache_clear()
    yield
    conftest.taken_by_gpu.cache_clear()


@pytest.mark.parametrize("found", [None, "vllm.platforms.cuda.CudaPlatform"])
def test_engines_are_skipped_where_vllm_finds_a_gpu(monkeypatch, found) -> None:
    monkeypatch.setitem(platforms.builtin_platform_plugins, "cuda", lambda: found)
    item: Any = Item("engine")
    if found is None:
        conftest.pytest_runtest_setup(item)
    else:
        with pytest.raises(pytest.skip.Exception, match="VLLM_BUILD=cpu make test"):
            conftest.pytest_runtest_setup(item)
    conftest.pytest_runtest_setup(Item("cpu"))  # type: ignore[arg-type]


DRAWING = """
from hypothesis import given, strategies as st

@given(st.integers(0, 2**64))
def test_draws(number):
    with open("drawn", "a") as file:
        print(number, file=file)

def test_seed(seed):
    assert not seed
"""


def _draw(folder: Path, *options: str) -> tuple[str, list[str]]:
    """What pytest prints, with `-q` and in CI, and the numbers that a test has drawn."""
    (folder / "test_drawing.py").write_text(DRAWING)
    (folder / "drawn").unlink(missing_ok=True)
    plugins = ("-p", "conftest", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-qm", "cpu", *plugins, *options, "test_drawing.py"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CI": "true", "PYTHONPATH": paths}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return run.stdout + run.stderr, (folder / "drawn").read_text().split()


@pytest.mark.slow
def test_every_run_draws_other_examples_and_says_how_to_repeat_them(tmp_path: Path) -> None:
    text, drawn = _draw(tmp_path)
    (option,) = re.findall(r"examples drawn with (--hypothesis-seed=\d+)", text)
    assert "1 failed, 1 passed" in text and option.endswith(f"={_seed_of(text)}"), text
    assert len(drawn) > 50
    assert _draw(tmp_path)[1] != drawn
    assert _draw(tmp_path, option)[1] == drawn


def _seed_of(text: str) -> str:
    (seed,) = set(re.findall(r"assert not (\d+)", text))
    return str(seed)
