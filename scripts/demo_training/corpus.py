# SPDX-License-Identifier: Apache-2.0
"""English text for training: the paragraphs of Python's HTML documentation (PSF licence).

The bench fills its prompts with the texts behind `help()` (`pydoc_data.topics`). They come from the
language reference and some pages of the library reference: that reference is left out here, and so
is every paragraph whose words occur in a topic.
"""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

from vllm_pyramid.tools.eval.haystack import topics

SKIPPED_FOLDERS = {"reference", "_sources", "_static"}
SKIPPED_PAGES = {"genindex.html", "py-modindex.html", "search.html", "license.html"}


class _Paragraphs(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._open = False
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "p":
            self._open, self._parts = True, []

    def handle_endtag(self, tag: str) -> None:
        if tag == "p" and self._open:
            self._open = False
            words = " ".join("".join(self._parts).replace("¶", "").split())
            if len(words) >= 60 and words.count(" ") >= 8:
                self.paragraphs.append(words)

    def handle_data(self, data: str) -> None:
        if self._open:
            self._parts.append(data)


def _plain(text: str) -> str:
    """Letters and digits alone, in lower case: equal whatever the markup was."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def training_pages(docs: Path) -> list[list[str]]:
    """The paragraphs of each page under the HTML folder, in the order of the paths.

    Raises:
        SystemExit: the folder holds too little text to be Python's documentation.
    """
    held_out = "\n".join(_plain(topic) for topic in topics().values())
    seen: set[str] = set()
    pages = []
    for path in sorted(docs.rglob("*.html")):
        relative = path.relative_to(docs)
        if relative.parts[0] in SKIPPED_FOLDERS or relative.name in SKIPPED_PAGES:
            continue
        parser = _Paragraphs()
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
        page = []
        for paragraph in parser.paragraphs:
            plain = _plain(paragraph)
            if plain not in seen and plain not in held_out:
                seen.add(plain)
                page.append(paragraph)
        if page:
            pages.append(page)
    characters = sum(len(paragraph) for page in pages for paragraph in page)
    if characters < 2_000_000:
        raise SystemExit(
            f"{docs} gave {characters:,} characters of text, at least 2,000,000 are needed: give "
            "the html folder of Python's documentation, for example that of Debian's package "
            "python3.11-doc"
        )
    return pages


def sentences(paragraph: str) -> list[str]:
    """Split after sentence ends; the pieces joined with spaces are the paragraph."""
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)
