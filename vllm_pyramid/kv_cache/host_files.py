# SPDX-License-Identifier: Apache-2.0
"""Bundles in files, which survive a restart: the scheduler's side.

    FOLDER/vllm-pyramid/lock               held by the engine that uses the folder
    FOLDER/vllm-pyramid/NAMESPACE/ab/...   a file of each rank for each bundle, named by the hash of
                                           the bundle's name

A lookup asks the system for the path that follows from the bundle's name. Only what this engine has
used itself is known, and what the limit needs of the rest is counted a few files in every step
(`old_files.py`).

A bundle is written when no request uses it any more, so that a process that is killed loses only
what its running requests hold. The workers copy the blocks at the begin of the next step and write
the files in threads (`worker/file_writer.py`). Files are read, and their checksums checked, when a
request finds the bundle neither on the device nor in host memory; whatever is wrong with one of
them is a miss for all ranks. The namespace says what bytes depend on apart from tokens: model, type
and layout of the cache, versions. Files of other namespaces go first.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from vllm.logger import init_logger

from vllm_pyramid.compat.side_channel import FileOrders, FileSave
from vllm_pyramid.kv_cache.bundle_file import (
    BundleFile,
    DamagedFileError,
    FileCounters,
    file_bytes,
    part_path,
    read_file,
)
from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.locked_folder import lock_folder
from vllm_pyramid.kv_cache.old_files import SUFFIX, OldFiles, unlink

logger = init_logger(f"vllm.{__name__}")

_PATIENCE = 60.0  # seconds that an engine that has been killed may take to end
# Seconds at the start for counting files; the rest is counted in steps, so many in each.
_START_S = 1.0
_PER_STEP = 64
# Bundles that this engine has used and knows by name, and those whose files it has removed.
MOST_KNOWN = 1 << 17
_MOST_GONE = 1 << 14


class HostFiles:
    """The bundles in a folder.

    Args:
        folder: the user's. A folder that only its owner reads is made in it.
        namespace: see `BundleFile.namespace`.
        block_bytes: of each block of each layer, in each rank that has it.
        limit: the most bytes of all files. largest: of a bundle's blocks in a rank.
        patience: seconds to wait for another engine that has the folder.
        parts: for each rank, which blocks of a bundle are those of its layers.

    Raises:
        ValueError: another engine uses the folder, or it is open to others.
    """

    def __init__(
        self,
        folder: str,
        namespace: str,
        block_bytes: int,
        limit: int,
        largest: int,
        patience: float = _PATIENCE,
        parts: Sequence[slice] = (slice(None),),
    ) -> None:
        self._namespace, self._block_bytes, self._limit = namespace, block_bytes, limit
        self._largest, self._parts = largest + 2**16, parts
        self._life, self._orders = secrets.token_hex(8), 0
        self._root = Path(folder).expanduser().absolute() / "vllm-pyramid"
        self._own = self._root / namespace
        self.counters = FileCounters()
        # By path: what has been written or read since the start, least recently
        # used first, and what was removed: the file may still be there.
        self._known: OrderedDict[str, int] = OrderedDict()
        self._known_bytes = 0
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._removed: list[str] = []
        self._saved: dict[str, FileSave] = {}  # by path
        self._told: set[str] = set()
        self._lock: BinaryIO | None = None
        self._is_open = True
        self._writes = self._prepare(patience)
        self._old = OldFiles(
            str(self._root), str(self._own), len(self._parts), self._knows, removes=self._writes
        )
        self._count_some()

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all files that are counted, those being written included."""
        return self._known_bytes + self._old.bytes

    @property
    def num_files(self) -> int:
        """Return the number of all bundles that are counted."""
        return len(self._known) + self._old.number

    # Start-up -----------------------------------------------------------------------------------

    def _prepare(self, patience: float) -> bool:
        """Make the folder and lock it; return whether files can be written."""
        try:
            self._lock = lock_folder(self._root, patience)
            self._own.mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            self._tell("unwritten", f"the folder cannot be written to: {problem}")
            return False
        return True

    def _count_some(self) -> None:
        """Count files of earlier engines for a while; steps count the others."""
        start = time.monotonic()
        self._old.advance(1 << 62, start + _START_S)
        logger.info(
            "kv-host-cache-dir: found %d bundles of this model and cache in %s, %d other files%s",
            *(self._old.num_own, self._own, self._old.number - self._old.num_own),
            "" if self._old.is_counted else "; still counting",
        )
        if self._writes:
            self._make_room(0)

    def close(self) -> None:
        """Let another engine have the folder; nothing is read or written any more."""
        self._writes = self._is_open = False
        self._known.clear()
        if self._lock is not None:
            self._lock.close()

    # Looking up ---------------------------------------------------------------------------------

    def __contains__(self, name: bytes) -> bool:
        path = self._path(name)
        return path in self._known or self._is_old(path)

    def _is_old(self, path: str) -> bool:
        """Return whether there is the file of a bundle that this engine has not used yet."""
        return self._is_open and path not in self._gone and os.path.lexists(path)

    def _knows(self, path: str) -> bool:
        return path in self._known or path in self._gone

    def _get_known(self, path: str) -> bool:
        """Return whether there is a bundle's file; it counts as used by this engine from now on."""
        if path in self._known:
            return True
        if not self._is_old(path):
            return False
        try:
            size = sum(os.lstat(part_path(path, part)).st_size for part in range(len(self._parts)))
        except OSError:  # a rank was killed before it had written its part
            if self._writes:
                self._unlink_parts(path)
            return False
        self._old.forget(path, size)
        self._know(path, size)
        return True

    def _know(self, path: str, size: int) -> None:
        self._known[path] = size
        self._known_bytes += size
        self._gone.pop(path, None)
        while len(self._known) > MOST_KNOWN and self._old.is_counted:
            _, size = self._known.popitem(last=False)
            self._known_bytes -= size
            self._old.add(size)

    def read(self, name: bytes) -> tuple[BundleFile, list[memoryview]] | None:
        """Return the head of a bundle's first file, and each rank's blocks; None: a miss."""
        path = self._path(name)
        if path in self._saved or not self._get_known(path):
            return None  # the order to write it has not been sent
        try:
            parts = [self._read_part(path, part, name) for part in range(len(self._parts))]
            found = parts[0][0]
            if any(head != found._replace(part=part) for part, (head, _) in enumerate(parts)):
                raise DamagedFileError("its parts were not written by one order")
        except FileNotFoundError:  # a part has not been written yet, or could not be
            self._drop(path)
            if self._writes:
                self._removed.append(path)
            return None
        except (DamagedFileError, OSError) as problem:
            self.counters.damaged += 1
            self._tell("damaged", f"{path}: {problem}")
            self._drop(path)
            if self._writes:
                self._unlink_parts(path)
            return None
        self._known.move_to_end(path)
        with suppress(OSError):
            os.utime(path)
        contents = [content for _, content in parts]
        self.counters.read += sum(map(len, contents))
        return found, contents

    def _read_part(self, path: str, part: int, name: bytes) -> tuple[BundleFile, memoryview]:
        """Read one rank's file; errors as of `read_file`, also where it is another's."""
        found, content = read_file(part_path(path, part), self._largest)
        if (found.name, found.namespace, found.part) != (name, self._namespace, part):
            raise DamagedFileError("it holds another bundle")
        if found.num_blocks < 1 or self._bytes_of(part, found.num_blocks) != len(content):
            raise DamagedFileError(f"it holds {len(content)} bytes of {found.num_blocks} blocks")
        return found, content

    def _bytes_of(self, part: int, num_blocks: int) -> int:
        """Return the bytes that a rank has of a bundle of `num_blocks` blocks."""
        return len(range(num_blocks)[self._parts[part]]) * self._block_bytes

    # Writing ------------------------------------------------------------------------------------

    def save(self, bundle: BlockBundle) -> None:
        """Order the file of a bundle that no request uses any more, unless there is one."""
        if not self._is_open or bundle.hash is None or not bundle.scheduled:
            return
        path = self._path(bundle.hash)
        if self._get_known(path):
            self._known.move_to_end(path)
            return
        blocks = [block.block_id for block in bundle.blocks]
        self._orders += 1
        order = f"{self._life} {self._orders}"
        first = BundleFile(self._namespace, bundle.hash, len(blocks), bundle.origin, 0, order)
        begins = [first._replace(part=part).begin() for part in range(len(self._parts))]
        size = sum(
            file_bytes(begin, self._bytes_of(part, len(blocks)))
            for part, begin in enumerate(begins)
        )
        if not self._writes or size > self._limit or not self._make_room(size):
            self.counters.unwritten += 1
            return
        self._know(path, size)
        self._saved[path] = FileSave(path, begins, blocks)
        self.counters.ordered += size

    def take(self) -> FileOrders | None:
        """Return what the worker is to do before the step that has just been scheduled."""
        if self._is_open:
            self._old.advance(_PER_STEP)
        if not self._saved and not self._removed:
            return None
        saved = list(reversed(self._saved.values()))  # a prompt's beginning becomes idle last
        orders = FileOrders(self._removed, saved)
        self._removed, self._saved = [], {}
        return orders

    def failed_to_write(self, count: int) -> None:
        """Count files that the worker could not write."""
        self.counters.unwritten += count
        if count:
            self._tell("unwritten", "the worker could not write a file; its log says why")

    def clear(self) -> None:
        """Remove this namespace's files, and use no more until the next start.

        Weights may change from now on, and a file's name says which weights were loaded.
        """
        if self._is_open and self._writes:
            paths = [
                f"{folder}/{name}" for folder, _, names in os.walk(self._own) for name in names
            ]
            for path in paths:
                unlink(path)
            logger.warning(
                "kv-host-cache-dir: the prefix cache was reset; removed %d files. The folder is "
                "unused until the next start",
                len(paths),
            )
            self._removed += self._known  # once more, behind what is being written
        self._writes = self._is_open = False
        self._known.clear()
        self._known_bytes = 0
        self._old.stop()
        self._saved.clear()

    def _make_room(self, size: int) -> bool:
        """Remove files until `size` more bytes are within the limit; return False if they are not.

        Before all files have been counted, none is removed.
        """
        while self.used_bytes + size > self._limit:
            if not self._old.is_counted:
                return self._known_bytes + size <= self._limit
            if (old := self._old.pop_oldest()) is not None:
                path, ours = old.path, old.ours
            elif self._old.number or not self._known:
                return False
            else:
                path, ours = next(iter(self._known)), True
            self.counters.evictions += 1
            if not ours:
                unlink(path)
                continue
            self._drop(path)
            if self._saved.pop(path, None) is None:
                self._removed.append(path)
        return True

    def _drop(self, path: str) -> None:
        """Know a bundle no more, whose files are about to go."""
        self._known_bytes -= self._known.pop(path, 0)
        self._gone[path] = None
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)

    def _unlink_parts(self, path: str) -> None:
        for part in range(len(self._parts)):
            unlink(part_path(path, part))

    def _path(self, name: bytes) -> str:
        digest = sha256(name).hexdigest()
        return f"{self._own}/{digest[:2]}/{digest}{SUFFIX}"

    def _tell(self, kind: str, text: str) -> None:
        """Log a problem the first time that one of its kind is met."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("kv-host-cache-dir: %s (a miss; later ones are only counted)", text)
