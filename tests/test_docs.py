# SPDX-License-Identifier: Apache-2.0
"""The documents: relative links lead to files, anchors to headings, and the site builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Pages of the site that lie in the root of the repository (scripts/site_pages.py).
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LAB = ROOT / "lab"  # the site has no links to it (scripts/site_pages.py)
DOCUMENTS = [ROOT / "README.md", *(ROOT / name for name in ROOT_PAGES), *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4}|\t)(?![ ]*[-*\d]).*$", re.MULTILINE)
_CODE = re.compile(r"(`+).+?\1", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}[ \t]+(.*?)[ \t]*#*$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets of the links and pictures outside code."""
    text = _CODE.sub("", _INDENTED.sub("", _FENCE.sub("", text)))
    return [*_LINK.findall(text), *_REFERENCE.findall(text)]


def anchor(heading: str) -> str:
    """A heading's anchor: lower case, no punctuation, hyphens for spaces."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    """All anchors of a document; a heading that comes again gets a number."""
    found: dict[str, int] = {}
    result = set()
    for heading in _HEADING.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        name = anchor(heading)
        result.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return frozenset(result)


def broken(path: Path, text: str) -> list[str]:
    """What is wrong with the relative links of a document."""
    wrong = []
    for target in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        place, _, name = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.is_relative_to(ROOT) or not file.is_file():
            wrong.append(f"{target}: there is no such file")
        elif name and (file.suffix != ".md" or name not in anchors(file)):
            wrong.append(f"{target}: there is no such heading")
        elif path.is_relative_to(DOCS) and not (
            file.is_relative_to(DOCS) or file.is_relative_to(LAB) or file in DOCUMENTS[1:]
        ):
            wrong.append(f"{target}: not a part of the site; write the path as code")
    return wrong


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(LAB.rglob("*.md"))], ids=_name)
def test_links(path: Path) -> None:
    assert broken(path, path.read_text(encoding="utf-8")) == []


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
    (found,) = broken(DOCS / "index.md", f"Text [with a link]({target}).")
    assert reason in found
    assert broken(DOCS / "index.md", f"`[code]({target})`") == []


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted([*there, *ROOT_PAGES])


def test_the_diagram_is_what_its_source_draws() -> None:
    source = ROOT / "scripts" / "draw_request.py"
    spec = importlib.util.spec_from_file_location("draw_request", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.OUTPUT.read_text(encoding="utf-8") == module.draw(), f"run {source}"


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*\"(?:https?:)?//"
    )
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(DOCUMENTS)  # README.md is none of them, 404.html is one more
    for page in pages:
        assert not loads.search(page.read_text(encoding="utf-8")), page


def test_the_readme_counts_the_policies() -> None:
    """On CUDA devices all but those that run on CPUs alone, by the parts that are refused there."""
    from vllm_pyramid.policy import load_policy, policy_names

    presets = [load_policy(name) for name in policy_names()]
    on_cuda = []
    for preset in presets:
        scorer = getattr(preset.attend, "scorer", None)
        stays_away = not preset.heads.on_cuda or getattr(preset.heads, "compensate", False)
        stays_away = stays_away or preset.prefill.skips_tiles
        if not stays_away and (scorer is None or (scorer.has_kernels and not scorer.needs_queries)):
            on_cuda.append(preset.name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| Policies | {len(presets)} | {len(on_cuda)} |" in readme


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
