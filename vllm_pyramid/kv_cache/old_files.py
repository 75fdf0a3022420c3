# SPDX-License-Identifier: Apache-2.0
"""Files of earlier engines in the host cache's folder: how many there are, and the oldest of them.

    counting     each file is looked at once, a few of them in every step, and none is remembered
    afterwards   the oldest `MOST_REMEMBERED` are: the first to go when there is no room

A lookup asks the system and needs none of this. A file that this engine has written or read is not
old: `HostFiles` knows it, and its bytes.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from vllm_pyramid.kv_cache.bundle_file import TEMPORARY, part_path

SUFFIX = ".kv"
# The oldest files of which the paths are kept, of some 200 bytes each.
MOST_REMEMBERED = 1 << 14
_DIGITS = 2  # of a bundle's name, which name the folder of its files


class OldFile(NamedTuple):
    """A file of an earlier engine; those of other namespaces come first, then the oldest.

    `path` is the first part in the engine's own namespace, any file in others.
    """

    ours: bool
    used: float
    path: str


class OldFiles:
    """The files in a folder that this engine has neither written nor read.

    Args:
        root: the folder of all namespaces. own: that of the engine's. parts: files of a bundle.
        is_known: whether this engine has written, read or removed the file at a path.
        removes: whether what earlier engines have not finished is removed.

    Attributes:
        number, bytes: what has been counted: files, of the engine's own namespace bundles.
    """

    def __init__(
        self, root: str, own: str, parts: int, is_known: Callable[[str], bool], *, removes: bool
    ) -> None:
        self._root, self._own, self._parts = root, own, parts
        self._is_known, self._removes = is_known, removes
        self.number = self.bytes = self.num_own = 0
        self.is_counted = False
        self._oldest: list[OldFile] = []  # the oldest last, once a walk is over
        self._found: list[tuple[bool, float, str]] = []  # a heap of a walk, the youngest first
        self._folders: list[str] = []
        self._ahead: set[str] = set()
        self._folder, self._names = "", set[str]()
        self._walks = False
        self._begin_walk()

    def advance(self, count: int, until: float | None = None) -> None:
        """Look at `count` more files, until a time of the monotonic clock if one is given."""
        while self._walks and count > 0 and (until is None or time.monotonic() < until):
            for _ in range(min(count, 256)):
                if not self._names and not self._next_folder():
                    self._end_walk()
                    break
                self._look_at(self._names.pop())
            count -= 256

    def forget(self, path: str, size: int) -> None:
        """Count a bundle no more, by its first file: this engine knows it now, or it is gone."""
        if self._has_counted(path):
            self.number -= 1
            self.num_own -= 1
            self.bytes -= size

    def add(self, size: int) -> None:
        """Count a bundle of the engine's own that it no longer knows."""
        self.number += 1
        self.num_own += 1
        self.bytes += size

    def pop_oldest(self) -> OldFile | None:
        """Return the file that goes first, and count it no more; None if it must be found first."""
        while self._oldest:
            oldest = self._oldest.pop()
            if self._is_known(oldest.path):
                continue
            size = self._size(oldest.path, self._parts if oldest.ours else 1)
            if size is None:  # another process has removed it
                continue
            self.number -= 1
            self.num_own -= oldest.ours
            self.bytes -= size
            self._walk_if_few()
            return oldest
        self._walk_if_few()
        return None

    def stop(self) -> None:
        """Count no file any more, and forget those that were counted."""
        self.number = self.bytes = self.num_own = 0
        self._walks, self.is_counted = False, True
        self._oldest, self._found = [], []

    # Walking ------------------------------------------------------------------------------------

    def _walk_if_few(self) -> None:
        if not self._walks and len(self._oldest) < min(self.number, MOST_REMEMBERED // 4):
            self._begin_walk()

    def _begin_walk(self) -> None:
        namespaces = _names_in(self._root)
        self._folders = [
            f"{self._root}/{namespace}/{name}"
            for namespace in namespaces
            for name in _names_in(f"{self._root}/{namespace}")
            if len(name) == _DIGITS
        ]
        self._ahead, self._walks = set(self._folders), True

    def _end_walk(self) -> None:
        self._oldest = [OldFile(not other, -age, path) for other, age, path in sorted(self._found)]
        self._found, self._folder = [], ""
        self._walks, self.is_counted = False, True

    def _next_folder(self) -> bool:
        """Begin with the next folder that has files; return False if there is none."""
        while self._folders and not self._names:
            self._folder = self._folders.pop()
            self._ahead.discard(self._folder)
            self._names = set(_names_in(self._folder))
        return bool(self._names)

    def _has_counted(self, path: str) -> bool:
        if self.is_counted:
            return True
        folder, _, name = path.rpartition("/")
        return folder not in self._ahead and not (folder == self._folder and name in self._names)

    def _look_at(self, name: str) -> None:
        stem, suffix, rest = name.partition(SUFFIX)
        first, path = f"{self._folder}/{stem}{SUFFIX}", f"{self._folder}/{name}"
        if not suffix or self._is_known(first):
            return
        if rest.endswith(TEMPORARY):
            if self._removes and not self.is_counted:
                unlink(path)
            return
        if rest and not rest[1:].isdecimal():
            return
        ours = self._folder.startswith(self._own + "/")
        if ours and rest:
            if self._removes and not os.path.lexists(first):
                unlink(path)  # its first part is missing
            return
        size = self._size(path, self._parts if ours else 1)
        if size is None:
            if ours and self._removes:  # a rank was killed before it had written its part
                for part in range(self._parts):
                    unlink(part_path(path, part))
            return
        with suppress(OSError):
            used = os.lstat(path).st_mtime
            if not self.is_counted:
                self.number += 1
                self.num_own += ours
                self.bytes += size
            entry = (not ours, -used, path)
            if len(self._found) < MOST_REMEMBERED:
                heapq.heappush(self._found, entry)
            else:
                heapq.heappushpop(self._found, entry)

    def _size(self, path: str, parts: int) -> int | None:
        """Return the bytes of a bundle's files; None if one is missing."""
        try:
            return sum(os.lstat(part_path(path, part)).st_size for part in range(parts))
        except OSError:
            return None


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no folder
        return []


def unlink(path: str) -> None:
    """Remove a file, if that can be done."""
    with suppress(OSError):
        os.unlink(path)
