# SPDX-License-Identifier: Apache-2.0
"""Show a value of a client's in a message, which never repeats much of it."""

from __future__ import annotations

MAX_QUOTED = 60  # characters
_MAX_BITS = 128


def quoted(value: object) -> str:
    """Return a value as a message shows it, in about `MAX_QUOTED` characters, at a fixed cost."""
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        if len(value) <= MAX_QUOTED:
            return _cut(repr(value))
        return f"{_cut(repr(value[:MAX_QUOTED]))} of {len(value)} characters"
    if isinstance(value, list | tuple) and len(value) <= MAX_QUOTED:
        if all(type(item) is int and item.bit_length() <= _MAX_BITS for item in value):
            return _cut(repr(value))
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."
