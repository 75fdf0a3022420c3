# SPDX-License-Identifier: Apache-2.0
"""Promises of the repository itself: packaging, licence headers, light imports."""

from __future__ import annotations

import csv
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vllm_pyramid

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_SUFFIXES = {".py", ".sh", ".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh", ".yaml"}


def sources() -> list[Path]:
    folders = ("vllm_pyramid", "csrc", "configs", "scripts", "tests", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [ROOT / "setup.py", *(p for p in found if p.is_file() and p.suffix in SOURCE_SUFFIXES)]


def test_the_list_of_packages_is_complete() -> None:
    """It is written out by hand, because configs/ is mapped into the package."""
    modules = (ROOT / "vllm_pyramid").rglob("*.py")
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in modules}
    assert sorted(folders | {"vllm_pyramid.configs"}) == PROJECT["tool"]["setuptools"]["packages"]


def test_one_version() -> None:
    from setuptools.config.pyprojecttoml import read_configuration

    assert "version" not in PROJECT["project"], "it stands in vllm_pyramid/version.py alone"
    read = read_configuration(ROOT / "pyproject.toml", ignore_option_errors=True)
    assert read["project"]["version"] == vllm_pyramid.__version__
    assert f"## [{vllm_pyramid.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"`{extra}`" in page or f"[{extra}]" in page, extra


def test_every_source_file_names_the_licence() -> None:
    bare = []
    for path in sources():
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
            bare.append(str(path.relative_to(ROOT)))
    assert not bare


def test_importing_the_package_is_light() -> None:
    """Plugins are loaded in every vLLM process: the import must not pull in an engine."""
    code = (
        "import sys, vllm_pyramid, vllm_pyramid.tools.demo\n"
        "heavy = {'vllm', 'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_unknown_attributes_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vllm_pyramid.nothing
    assert dir(vllm_pyramid) == ["LLM", "__version__"]


def test_no_document_has_a_gap() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"@[A-Z]{3,}@|\bTODO\b|NOTE: the figures", path.read_text()), path


def _table(name: str) -> list[dict[str, str]]:
    with (ROOT / "docs" / "results" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("run", _table("bench-commands.csv"), ids=lambda run: run["run"])
def test_kept_figures_have_the_command_that_makes_them(run: dict[str, str]) -> None:
    """The command names no path of the machine that ran it, and a page names the run."""
    words = shlex.split(run["command"])
    if re.fullmatch(r"VLLM_PYRAMID_\w+=\w+", words[0]):  # a variable of this package's own
        del words[0]
    assert words[:2] == ["vllm-pyramid", "bench"] and not any(w.startswith("/") for w in words)
    rows = [row for row in _table("bench.csv") if row["run"] == run["run"]]
    assert rows and run["processor"] and run["date"]
    given = dict(itertools.pairwise(words))
    if "--pool-prompts" in given:
        pools = set(map(float, given["--pool-prompts"].split(",")))
        assert {float(row["pool_prompts"]) for row in rows} == pools
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert any(f"`{run['run']}`" in text for text in pages), f"no page names {run['run']}"


def test_every_kept_row_belongs_to_a_run() -> None:
    runs = {run["run"] for run in _table("bench-commands.csv")}
    assert {row["run"] for row in _table("bench.csv")} == runs
    assert {row["run"] for row in _table("bench-profiles.csv")} <= runs
