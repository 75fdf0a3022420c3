# SPDX-License-Identifier: Apache-2.0
"""States in a folder that all engines share: on one host `/dev/shm`, on several a network's."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path

from vllm_pyramid.kv_cache.bundle_file import TEMPORARY, DamagedFileError, write_pieces

_OURS = re.compile(rf"[0-9a-f]{{32}}\.(head|\d+)({re.escape(TEMPORARY)})?")


class FolderTransport:
    """A `Transport` over files; its OSErrors are the system's.

    Every engine with the folder removes files older than `ttl_s` seconds, those of others included:
    the engine that has put them may have ended.
    """

    def __init__(self, folder: str, ttl_s: float, limit_bytes: int) -> None:
        self._folder, self._ttl_s, self._limit = Path(folder), ttl_s, limit_bytes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ends = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, daemon=True, name="kv-states")
        self._sweeper.start()

    def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        size = sum(piece.nbytes for piece in pieces)
        used = sum(stat.st_size for _, stat in self._files())
        if used + size > self._limit:
            raise OSError(
                ENOSPC, f"states of {used} bytes wait in {self._folder}, of {self._limit} at most"
            )
        write_pieces(str(self._folder / name), pieces)

    def get(self, name: str, peer: str, largest: int) -> memoryview | None:
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            if (size := os.fstat(descriptor).st_size) > largest:
                raise DamagedFileError("it is too large")
            data = memoryview(bytearray(size))
            return data[: file.readinto(data)]

    def drop(self, name: str, peer: str) -> None:
        with suppress(OSError):
            os.unlink(self._folder / name)

    def close(self) -> None:
        self._ends.set()
        self._sweeper.join()

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _OURS.fullmatch(entry.name):
                        yield entry.path, entry.stat(follow_symlinks=False)

    def _sweep(self) -> None:
        while not self._ends.wait(min(self._ttl_s / 4, 10.0)):
            with suppress(OSError):
                for path, stat in self._files():
                    if stat.st_mtime + self._ttl_s < time.time():
                        with suppress(OSError):  # those behind it are removed all the same
                            os.unlink(path)
