# SPDX-License-Identifier: Apache-2.0
"""Check the repository itself: links, licence headers, the list of packages, the version.

Run by `make lint`; `make docs` runs it with `--site build/site` on the pages that it has built.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
METHODS = DOCS / "methods"  # written by scripts/method_pages.py, and in no navigation
# Pages of the site that lie in the root of the repository (scripts/site_pages.py).
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LAB = ROOT / "lab"  # the site has no links to it (scripts/site_pages.py)
DOCUMENTS = [ROOT / "README.md", *(ROOT / name for name in ROOT_PAGES), *sorted(DOCS.rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCE_FOLDERS = ("vllm_pyramid", "csrc", "configs", "scripts", "tests", "examples", "lab")
SOURCE_SUFFIXES = {".py", ".sh", ".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh", ".yaml"}

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


def check_links() -> Iterator[str]:
    for path in (*DOCUMENTS, *sorted(LAB.rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        yield from (f"{_name(path)}: {wrong}" for wrong in broken(path, text))
        if re.search(r"@[A-Z]{3,}@|\bTODO\b", text):
            yield f"{_name(path)}: has a gap or a TODO"


def check_navigation() -> Iterator[str]:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    named = set(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages_of_docs = {path for path in DOCS.rglob("*.md") if path.parent != METHODS}
    there = {path.relative_to(DOCS).as_posix() for path in pages_of_docs} | {*ROOT_PAGES}
    yield from (f"mkdocs.yml: {page} is not in the navigation" for page in sorted(there - named))
    yield from (f"mkdocs.yml: there is no {page}" for page in sorted(named - there))


def check_licences() -> Iterator[str]:
    found = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*")]
    files = [p for p in found if p.is_file() and p.suffix in SOURCE_SUFFIXES]
    for path in (ROOT / "setup.py", ROOT / "conftest.py", *files):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
            yield f"{_name(path)}: begins without SPDX-License-Identifier: Apache-2.0"


def check_packaging() -> Iterator[str]:
    """configs/ is mapped into the package, which needs a list of packages written by hand."""
    modules = (ROOT / "vllm_pyramid").rglob("*.py")
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in modules}
    if sorted(folders | {"vllm_pyramid.configs"}) != PROJECT["tool"]["setuptools"]["packages"]:
        yield "pyproject.toml: the list of packages is not that of the folders, sorted"
    if "version" in PROJECT["project"]:
        yield "pyproject.toml: the version stands in vllm_pyramid/version.py alone"
    text = (ROOT / "vllm_pyramid" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        yield f"CHANGELOG.md: has no section [{version}]"
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    for extra in PROJECT["project"]["optional-dependencies"]:
        if f"`{extra}`" not in page and f"[{extra}]" not in page:
            yield f"docs/install.md: does not name the extra {extra}"


def check_site(folder: Path) -> Iterator[str]:
    """The site's pages load nothing from another host."""
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*\"(?:https?:)?//"
    )
    pages = list(folder.rglob("*.html"))
    if len(pages) < len(DOCUMENTS):  # README.md is none of them, 404.html is one more
        yield f"{folder}: has {len(pages)} pages for {len(DOCUMENTS)} documents"
    for page in pages:
        if loads.search(page.read_text(encoding="utf-8")):
            yield f"{page}: loads something from another host"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, help="check the pages of a built site instead")
    site = parser.parse_args().site
    checks = [check_links(), check_navigation(), check_licences(), check_packaging()]
    wrong = [line for found in ([check_site(site)] if site else checks) for line in found]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
