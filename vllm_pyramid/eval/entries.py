# SPDX-License-Identifier: Apache-2.0
"""Entries of a file of JSON lines, and their fields, with errors that say what is wrong where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["entries", "text_field", "texts_field"]


def entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entries with their line numbers, from 1; empty lines are no entries.

    Raises:
        ValueError: a line is not UTF-8, not JSON or not an object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode())
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON in UTF-8: {error}") from None
            if not isinstance(entry, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield number, entry


def text_field(entry: dict[str, Any], name: str) -> str:
    """A field that must be a text.

    Raises:
        ValueError: it is missing or something else.
    """
    value = _field(entry, name)
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} must be a text, not {value!r:.60}")
    return value


def texts_field(entry: dict[str, Any], name: str) -> tuple[str, ...]:
    """A field that must be a list of at least one text.

    Raises:
        ValueError: it is missing or something else.
    """
    value = _field(entry, name)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f"the field {name!r} must be a list of texts, not {value!r:.60}")
    return tuple(value)


def _field(entry: dict[str, Any], name: str) -> Any:
    if name not in entry:
        raise ValueError(f"no field {name!r}; there are: {', '.join(entry) or 'none'}")
    return entry[name]
