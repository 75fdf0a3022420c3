# SPDX-License-Identifier: Apache-2.0
"""Promises of the repository itself: packaging, licence headers, light imports."""

from __future__ import annotations

import re
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
    folders = ("vllm_pyramid", "csrc", "configs", "scripts", "tests", "lab", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    loose = (ROOT / "setup.py", ROOT / "conftest.py")
    return [*loose, *(p for p in found if p.is_file() and p.suffix in SOURCE_SUFFIXES)]


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
