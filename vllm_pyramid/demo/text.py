# SPDX-License-Identifier: Apache-2.0
"""Real English text that every CPython carries: the Python documentation behind `help()`.

`pydoc_data.topics` holds about half a megabyte of the language and library reference (licence: the
PSF licence of Python itself). It is read where Python has installed it; nothing of it is copied
into this package. Its wording differs a little between Python versions.
"""

from __future__ import annotations

from functools import cache

# Prose-heavy topics, in the order in which the demonstration's prompt uses them.
PROMPT_TOPICS = (
    "execmodel",
    "exceptions",
    "attribute-access",
    "customization",
    "comparisons",
    "typesseq",
    "formatstrings",
)


@cache
def topics() -> dict[str, str]:
    """Topic name to text, sorted by name.

    Raises:
        RuntimeError: this Python was installed without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics as raw
    except ImportError as error:
        raise RuntimeError(
            "this Python has no 'pydoc_data.topics' (the text behind help()), which the "
            "demonstration reads: install the distribution's full standard library, for "
            "example the package 'libpython3-stdlib'"
        ) from error
    return {name: raw[name] for name in sorted(raw)}


def corpus() -> list[str]:
    """All topics' texts, in the order of their names: what the demo tokenizer is trained on."""
    return list(topics().values())


def prompt_text() -> str:
    """The chosen topics as one long document, in a fixed order (about 90,000 characters)."""
    available = topics()
    return "\n\n".join(available[name] for name in PROMPT_TOPICS if name in available)
