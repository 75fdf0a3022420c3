# SPDX-License-Identifier: Apache-2.0
"""Real English text that every CPython carries: the Python documentation behind `help()`.

`pydoc_data.topics` holds about half a megabyte of the language and library reference (licence: the
PSF licence of Python itself). It is read where Python has installed it; nothing of it is copied
into this package. Its wording differs a little between Python versions.
"""

from __future__ import annotations

from functools import cache


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
            "this Python has no 'pydoc_data.topics' (the text behind help()), from which the "
            "prompts are made: install the distribution's full standard library, for "
            "example the package 'libpython3-stdlib'"
        ) from error
    return {name: raw[name] for name in sorted(raw)}
