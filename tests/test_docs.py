# SPDX-License-Identifier: Apache-2.0
"""Documents that the code writes, and what checks the others."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu

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


def refused() -> str:
    """The table of what is refused, from the code's own list."""
    from vllm_pyramid.frontend.refusals import OF_CONFIGURATION
    from vllm_pyramid.frontend.refused_flags import OF_ARGUMENTS

    def code(text: str) -> str:
        return re.sub(
            r"--[a-z-]+(?: (?:pooling|none|bfloat16))?|attention_config\.\w+", r"`\g<0>`", text
        )

    rows = [
        f"| {code(entry.what.rstrip(':'))} | {code(entry.why)} |"
        for entry in (*OF_ARGUMENTS, *OF_CONFIGURATION)
    ]
    return "\n".join(["| Does not work with a policy | Why, and what to do |", "|---|---|", *rows])


def test_what_is_refused_is_what_the_code_says() -> None:
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    assert refused() in text, f"docs/limits.md wants this table:\n{refused()}"
