# SPDX-License-Identifier: Apache-2.0
"""What the commands of `vllm-pyramid` share: lists on the command line, files, progress bars."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "Progress",
    "check_writable",
    "has_matplotlib",
    "names",
    "numbers",
    "progress_bar",
    "split_cache_dtype",
]


def names(text: str, what: str) -> tuple[str, ...]:
    """The parts of a list such as `full,snapkv`, each once.

    Raises:
        ValueError: there are none.
    """
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise ValueError(f"{what} is empty: give at least one, separated by commas")
    return found


def numbers(text: str, what: str, least: int) -> tuple[int, ...]:
    """The whole numbers of a list such as `1024,4096`.

    Raises:
        ValueError: there are none, or one is too small or something else.
    """
    found = names(text, what)
    for name in found:
        if not name.isascii() or not name.isdigit() or int(name) < least:
            raise ValueError(f"{what}: {name!r} is not a whole number of at least {least}")
    return tuple(map(int, found))


def split_cache_dtype(policy: str) -> tuple[str, str | None]:
    """`snapkv@fp8` is the policy `snapkv` on a KV cache of `--kv-cache-dtype fp8`.

    Returns:
        The policy, and the cache's type; None for the model's own.

    Raises:
        ValueError: the cache cannot have that type.
    """
    name, at, dtype = policy.rpartition("@")
    if not at:
        return policy, None
    from vllm_pyramid.compat.backend_names import FP8_CACHES, SCALED_ROWS

    if dtype not in (types := (*FP8_CACHES, *SCALED_ROWS)):
        raise ValueError(
            f"{policy!r}: behind the @ goes a type of KV cache, one of {', '.join(types)}"
        )
    return name, dtype


def check_writable(folder: Path, paths: Iterable[Path | None]) -> None:
    """Find out now, not after a long run, whether the results can be written.

    Leaves no empty file behind, which would look like the results of a run that was stopped.

    Raises:
        ValueError: the folder cannot be made, or a file not opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path is not None:
                is_new = not path.exists()
                path.open("a").close()
                if is_new:
                    path.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {error.filename}: {error.strerror}") from error


def progress_bar(console: Any) -> Any:
    """Rich's, with what is done of how much and the time that is left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class Progress:
    """A progress bar that shows what is being done, and how many of `total` are done."""

    def __init__(self, console: Any, total: int) -> None:
        self._bar = progress_bar(console)
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Show what is being done."""
        self._bar.update(self._task, description=text)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self._bar.advance(self._task, count)


def has_matplotlib() -> bool:
    """Whether pictures can be drawn at all."""
    return importlib.util.find_spec("matplotlib") is not None
