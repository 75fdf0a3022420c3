# SPDX-License-Identifier: Apache-2.0
"""Bundles in files, which survive a restart: the scheduler's side.

    FOLDER/vllm-pyramid/lock               held by the engine that uses the folder
    FOLDER/vllm-pyramid/NAMESPACE/ab/...   a file of each rank for each bundle, named by the hash of
                                           the bundle's name

A bundle is written when no request uses it any more, so that a process that is killed loses only
what its running requests hold. The workers copy the blocks at the begin of the next step and write
the files in threads (`worker/file_writer.py`). Files are read, and their checksums checked, when a
request looks for the bundle and finds it neither on the device nor in host memory; whatever is
wrong with one of them is a miss for all ranks. The namespace says what bytes depend on apart from
tokens: model, type and layout of the cache, versions. Files of other namespaces go first.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from vllm.logger import init_logger

from vllm_pyramid.compat.side_channel import FileOrders, FileSave
from vllm_pyramid.kv_cache.bundle_file import (
    TEMPORARY,
    BundleFile,
    DamagedFileError,
    file_bytes,
    part_path,
    read_file,
)
from vllm_pyramid.kv_cache.bundles import BlockBundle

logger = init_logger(f"vllm.{__name__}")

_SUFFIX = ".kv"
_PATIENCE = 60.0  # seconds that an engine that has been killed may take to end


@dataclass(slots=True)
class FileCounters:
    """Counters of the files since the start.

    Attributes:
        ordered, read: bytes that the worker was told to write, and bytes that were read.
        damaged: files that could not be read as what they should hold.
        unwritten: files that could not be written.
        evictions: files that had to go, for lack of room.
    """

    ordered: int = 0
    read: int = 0
    damaged: int = 0
    unwritten: int = 0
    evictions: int = 0


class HostFiles:
    """The bundles in a folder.

    Args:
        folder: the user's. A folder of its own is made in it, which only its owner reads.
        namespace: see `BundleFile.namespace`.
        block_bytes: of each block of each layer, in each rank that has it.
        limit: the most bytes of all files.
        largest: the most bytes of a bundle's blocks in a rank.
        patience: seconds to wait for another engine that has the folder.
        parts: for each rank, which blocks of a bundle are those of its layers.

    Attributes:
        counters: what has happened.

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
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by path, least recently used first
        self._used = 0
        self._removed: list[str] = []
        self._saved: dict[str, FileSave] = {}  # by path
        self._told: set[str] = set()
        self._lock: BinaryIO | None = None
        self._is_open = True
        self._writes = self._prepare(patience)
        if self._is_open:
            self._scan()

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all files, those that are being written included."""
        return self._used

    @property
    def num_files(self) -> int:
        """Return the number of all files."""
        return len(self._sizes)

    # Start-up -----------------------------------------------------------------------------------

    def _prepare(self, patience: float) -> bool:
        """Make the folder and lock it; return whether files can be written."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            self._lock = os.fdopen(os.open(self._root / "lock", flags, 0o600), "wb")
            self._wait_for(self._lock, patience)
            self._own.mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            self._tell("unwritten", f"the folder cannot be written to: {problem}")
            return False
        return True

    def _check_owner(self) -> None:
        found = self._root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(
                f"--kv-host-cache-dir: {self._root} must be a folder of the user of this process, "
                "since its files are read as KV: choose another folder"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"--kv-host-cache-dir: {self._root} holds the KV of prompts and is open to other "
                "users: chmod 700, or choose another folder"
            )

    def _wait_for(self, lock: BinaryIO, patience: float) -> None:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ValueError(
                        f"--kv-host-cache-dir: another engine uses {self._root}: give each engine "
                        "a folder of its own"
                    ) from None
                time.sleep(0.2)
            else:
                return

    def _scan(self) -> None:
        """Find the files of earlier engines, and remove what these had not finished."""
        by_path: defaultdict[str, list[os.stat_result]] = defaultdict(list)
        for path in self._root.glob("*/??/*"):
            name, suffix, rest = path.name.partition(_SUFFIX)
            if suffix and rest.endswith(TEMPORARY):
                _unlink(str(path))
            elif suffix and (not rest or rest[1:].isdecimal()):
                with suppress(OSError):
                    by_path[f"{path.parent}/{name}{suffix}"].append(path.lstat())
        found: list[tuple[bool, float, str, int]] = []
        for first, infos in by_path.items():
            ours = Path(first).is_relative_to(self._own)
            if ours and len(infos) != len(self._parts):
                self._unlink_parts(first)  # a rank was killed before it had written its part
                continue
            latest, size = max(info.st_mtime for info in infos), sum(i.st_size for i in infos)
            found.append((ours, latest, first, size))
        for *_, name, size in sorted(found):
            self._sizes[name] = size
            self._used += size
        num_own = sum(1 for ours, *_ in found if ours)
        logger.info(
            "kv-host-cache-dir: %d bundles of this model and cache in %s, %d of others",
            *(num_own, self._own, len(found) - num_own),
        )
        if self._writes:
            self._make_room(0)

    def close(self) -> None:
        """Let another engine have the folder; nothing is read or written any more."""
        self._writes = self._is_open = False
        self._sizes.clear()
        if self._lock is not None:
            self._lock.close()

    # Looking up ---------------------------------------------------------------------------------

    def __contains__(self, name: bytes) -> bool:
        return self._path(name) in self._sizes

    def read(self, name: bytes) -> tuple[BundleFile, list[memoryview]] | None:
        """Return what the files of a bundle hold, and the bytes of its blocks; None: a miss.

        Returns:
            The head of the first part, and for each rank the bytes of its blocks.
        """
        path = self._path(name)
        if path not in self._sizes:
            return None
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
        self._sizes.move_to_end(path)
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
        if path in self._sizes:
            self._sizes.move_to_end(path)
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
        if not self._writes or size > self._limit:
            self.counters.unwritten += 1
            return
        self._make_room(size)
        self._sizes[path] = size
        self._used += size
        self._saved[path] = FileSave(path, begins, blocks)
        self.counters.ordered += size

    def take(self) -> FileOrders | None:
        """Return what the worker is to do before the step that has just been scheduled."""
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
        """Remove the files of this namespace, and use the folder no more until the next start.

        Weights may change behind this engine's back now, and a file's name says which weights were
        loaded.
        """
        own = [path for path in self._sizes if Path(path).is_relative_to(self._own)]
        if self._is_open and self._writes:
            for path in own:
                self._unlink_parts(path)
            logger.warning(
                "kv-host-cache-dir: the prefix cache was reset, so %d files were removed, and the "
                "folder is not used until the next start",
                len(own),
            )
            self._removed += own  # once more, behind what is being written
        self._writes = self._is_open = False
        self._sizes.clear()
        self._used = 0
        self._saved.clear()

    def _make_room(self, size: int) -> None:
        while self._sizes and self._used + size > self._limit:
            path = next(iter(self._sizes))
            self._drop(path)
            self.counters.evictions += 1
            if not Path(path).is_relative_to(self._own):
                for file in Path(path).parent.glob(f"{Path(path).name}*"):  # of any ranks
                    _unlink(str(file))
            elif self._saved.pop(path, None) is None:
                self._removed.append(path)

    def _drop(self, path: str) -> None:
        self._used -= self._sizes.pop(path, 0)

    def _unlink_parts(self, path: str) -> None:
        for part in range(len(self._parts)):
            _unlink(part_path(path, part))

    def _path(self, name: bytes) -> str:
        digest = sha256(name).hexdigest()
        return f"{self._own}/{digest[:2]}/{digest}{_SUFFIX}"

    def _tell(self, kind: str, text: str) -> None:
        """Log a problem the first time that one of its kind is met."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("kv-host-cache-dir: %s (a miss; later ones are only counted)", text)


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
