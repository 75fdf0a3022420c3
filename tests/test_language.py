# SPDX-License-Identifier: Apache-2.0
"""The worst habits of prose are kept out of the package and its documents.

A docstring says what happens and begins with a verb; a sentence has a subject that is a thing of
the program (CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "vllm_pyramid").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "lab").rglob("*.md"))
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))

# Subjects that are no thing of the program, and phrases that stand in for a word of the field.
HABITS = re.compile(
    r"\b(nobody|somebody|anybody|whoever|who is preempted|see the base|so many|beside|thrown out|"
    r"let in|goes? on from|leaves? behind)\b",
    re.IGNORECASE,
)
# First words of a docstring that make it a fragment.
_NOUNS = """
A All An As At By Each Every For From How If In It Its No Not Of On One See So That The Their
These This To What When Where Whether Which Who Whose Why With Tokens Blocks Bytes Rows Requests
"""
NO_VERBS = frozenset(_NOUNS.split())


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and strings of a module, line by line; all lines of another file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def fragments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions whose docstring begins with no verb; properties are named by nouns."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {
            ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list
        }
        text = ast.get_docstring(node)
        if text and not decorators & {"property", "cached_property"}:
            first = re.split(r"[\s,.:;]", text.strip("`"), maxsplit=1)[0]
            if first in NO_VERBS:
                yield node.name, text.splitlines()[0]


def test_habits_are_recognised() -> None:
    assert HABITS.search("See the base.") and HABITS.search("Nobody refers to it.")
    assert not HABITS.search("besides the cache")
    bad = 'def f():\n    """The tokens of a row."""\n'
    good = 'def f():\n    """Return the tokens of a row."""\n'
    assert list(fragments(ast.parse(bad))) == [("f", "The tokens of a row.")]
    assert not list(fragments(ast.parse(good)))


@pytest.mark.parametrize(
    "path", [*MODULES, *PAGES, *PRESETS], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_no_sentence_has_a_worst_habit(path: Path) -> None:
    found = [f"{line}: {text.strip()}" for line, text in prose(path) if HABITS.search(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_begin_with_a_verb(path: Path) -> None:
    found = list(fragments(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, "\n".join(f"{name}: {line}" for name, line in found)
