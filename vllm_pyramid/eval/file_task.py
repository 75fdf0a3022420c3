# SPDX-License-Identifier: Apache-2.0
"""Tasks whose samples are the entries of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_pyramid.eval.entries import entries
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import Sample, Task

__all__ = ["FileTask", "find_files"]


class FileTask(Task):
    """The first entries of a file. No seed and no length changes them.

    Args:
        path: JSON lines. name: for tables. limit: returns the most tokens that a prompt may have
            when so many are to be generated.
    """

    def __init__(self, path: Path, name: str, metric: str, limit: Callable[[int], int]) -> None:
        self.path = path
        self.name = self.title = name
        self.summary = f"entries of {path.name}"
        self.metric = metric
        self._limit = limit

    def lengths(self, asked: Sequence[int]) -> Sequence[int]:
        return (0,)

    def seeds(self, asked: Sequence[int]) -> Sequence[int]:
        return tuple(asked[:1])

    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        """The first `count` entries, or all if there are fewer.

        Raises:
            ValueError: an entry that cannot be used; names the line.
        """
        made: list[Sample] = []
        for line, entry in entries(self.path):
            try:
                made.append(self._sample(tokens, entry))
            except ValueError as error:
                raise ValueError(f"{self.path}, line {line}: {error}") from error
            if len(made) == count:
                break
        if not made:
            raise ValueError(f"{self.path} has no entries")
        return made

    def _sample(self, tokens: Tokens, entry: dict[str, Any]) -> Sample:
        raise NotImplementedError


def find_files(paths: Sequence[str], flag: str, pattern: str) -> list[Path]:
    """The files, and of folders those that match `pattern`, each once, in order.

    Raises:
        ValueError: there is none; names the flag.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.glob(pattern)) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            what = f"no {pattern} in the folder" if path.is_dir() else "there is no file or folder"
            raise ValueError(f"{flag}: {what} {str(path)!r}")
        found += files
    return list(dict.fromkeys(found))
