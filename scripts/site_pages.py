# SPDX-License-Identifier: Apache-2.0
"""Hooks of the site (mkdocs.yml): CONTRIBUTING.md and CHANGELOG.md become pages beside docs/.

They stay in the root of the repository, where people look for them. Links to and from them are
those of the repository and are changed to those of the site.

lab/ is no part of the site: a link to it becomes its text, with the path as title.

The theme's switch between light and dark asks for the style sheets of a highlighter, which would be
loaded from elsewhere and is off: it gets empty ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
TO_LAB = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?:\.\./)*(lab/[^)\s]+)\)")
TO_THEM = re.compile(r"\]\(\.\./((?:\.\./)*(?:CONTRIBUTING|CHANGELOG)\.md)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page."""
    markdown = TO_LAB.sub(r'<span title="\2">\1</span>', markdown)
    if page.file.src_uri in PAGES:
        return markdown.replace("](docs/", "](")
    return TO_THEM.sub(r"](\1", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Add what the theme's switch between light and dark asks for."""
    empty = '<style id="hljs-light"></style><style id="hljs-dark"></style>'
    return output.replace("</head>", f"{empty}</head>", 1)
