# SPDX-License-Identifier: Apache-2.0
"""Documents that the code writes, and what checks the others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from vllm_pyramid.policy import load_presets

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def _script(name: str) -> ModuleType:
    source = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere.md", "no such file"),
        ("usage.md#nothing", "no such heading"),
        ("#nothing", "no such heading"),
        ("../setup.py", "not a part of the site"),
    ],
)
def test_broken_links_are_found(target: str, reason: str) -> None:
    broken = _script("check_repo").broken
    (found,) = broken(DOCS / "index.md", f"Text [with a link]({target}).")
    assert reason in found
    assert broken(DOCS / "index.md", f"`[code]({target})`") == []


def test_the_diagram_is_what_its_source_draws() -> None:
    module = _script("draw_request")
    assert module.OUTPUT.read_text(encoding="utf-8") == module.draw(), f"run {module.__file__}"


def test_the_tables_of_what_is_refused_are_those_of_the_code() -> None:
    module = _script("write_limits")
    text = module.OUTPUT.read_text(encoding="utf-8")
    assert module.written(text) == text, f"run {module.__file__}"


def test_pages_of_methods_are_what_the_code_says() -> None:
    module = _script("method_pages")
    wanted = module.pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in module.FOLDER.iterdir()}
    assert there == wanted, f"run {module.__file__}"


def test_a_page_has_the_values_of_its_preset() -> None:
    pages = _script("method_pages").pages()
    assert "| `kernel_size` | 11 | width of the pooling" in pages["pyramidkv-wide.md"]
    assert "| `attend.budget` | 12% |" in pages["select.md"]
    assert "| `chunk.scorer` | keydiff |" in pages["snapkv-chunked.md"]
    assert "No preset has it" in pages["ridge.md"]


def test_they_have_the_rows_of_all_policies() -> None:
    """The kinds and fields of which they are made are those of the presets, and more."""
    told = {(row.part, row.features) for row in _script("write_limits").rows()}
    rows = [row for policy in load_presets() for row in policy.refusals]
    assert {(row.part, row.features) for row in rows} <= told
