# SPDX-License-Identifier: Apache-2.0
"""The file of one bundle: what it holds, its bytes, and a checksum.

    magic, version, length of the head | head: JSON | blocks, as they are in the cache | SHA-256

Each rank of an engine writes its part of a bundle to its own file, under a temporary name, and
renames it: a process that is killed leaves no half file under a name that is looked up. What a
power failure may leave fails the checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from struct import Struct, error
from typing import Any, NamedTuple

FORMAT = 2
TEMPORARY = ".part"
_BEGIN = Struct("<12sHI")
_MAGIC = b"pyramid-kv\r\n"
_SUM_BYTES = sha256().digest_size


@dataclass(slots=True)
class FileCounters:
    """Counters of the files since the start.

    `ordered` and `read` are bytes to be written and bytes read. `damaged` files could not be read
    as what they should hold, `unwritten` ones not be written; `evictions` had to go, for lack of
    room.
    """

    ordered: int = 0
    read: int = 0
    damaged: int = 0
    unwritten: int = 0
    evictions: int = 0


class DamagedFileError(Exception):
    """A file that does not hold what its name says."""


class BundleFile(NamedTuple):
    """What a bundle's file holds.

    Attributes:
        namespace: of whatever the bytes depend on apart from the bundle's name.
        num_blocks: blocks of all layers, those of other parts included.
        origin: see `BlockBundle.origin`.
        part: number of the rank that wrote it.
        order: names the order to write it, which all parts of one bundle share.
    """

    namespace: str
    name: bytes
    num_blocks: int
    origin: str | None
    part: int = 0
    order: str = ""

    def begin(self) -> bytes:
        """Return the bytes that come before those of the blocks."""
        text = json.dumps({**self._asdict(), "name": self.name.hex()}).encode()
        return _BEGIN.pack(_MAGIC, FORMAT, len(text)) + text


def part_path(path: str, part: int) -> str:
    """Return the path of one part of a bundle, whose first part is at `path`."""
    return f"{path}.{part}" if part else path


def file_bytes(begin: bytes, content_bytes: int) -> int:
    """Return the length of a file."""
    return len(begin) + content_bytes + _SUM_BYTES


def sealed(begin: bytes, content: Any) -> list[memoryview]:
    """Return the parts of a file in order: its first bytes, its content, and a checksum."""
    total = sha256(begin)
    total.update(content)
    return [memoryview(data).cast("B") for data in (begin, content, total.digest())]


def write_file(path: str, begin: bytes, content: Any) -> None:
    """Write a file of blocks, a buffer, and its folder if missing. Errors as `write_pieces`."""
    Path(path).parent.mkdir(mode=0o700, exist_ok=True)
    write_pieces(path, sealed(begin, content))


def write_pieces(path: str, pieces: Sequence[memoryview]) -> None:
    """Write a file under a temporary name, and rename it; after an OSError there is no new file."""
    part = path + TEMPORARY
    with suppress(FileNotFoundError):
        os.unlink(part)
    try:
        with open(part, "xb", buffering=0, opener=_open_own) as file:
            for data in pieces:
                _write_all(file, data)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise


def read_file(path: str, largest: int) -> tuple[BundleFile, memoryview]:
    """Read a bundle's file of at most `largest` bytes: what it holds, and the bytes of its blocks.

    Raises:
        DamagedFileError: it was not written like this, or has been changed or cut since.
        OSError: as the system says, such as `FileNotFoundError`.
    """
    with open(path, "rb", buffering=0, opener=_open_own) as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise DamagedFileError("it is too large")
        return parse_file(memoryview(file.read()))


def parse_file(data: memoryview) -> tuple[BundleFile, memoryview]:
    """Return what the bytes of a file hold, and its blocks; DamagedFileError as `read_file`."""
    try:
        magic, version, length = _BEGIN.unpack_from(data)
    except error:
        raise DamagedFileError("it is too short") from None
    if magic != _MAGIC or version != FORMAT:
        raise DamagedFileError("it is of another format")
    body, digest = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if sha256(body).digest() != digest:
        raise DamagedFileError("its checksum is wrong")
    content = _BEGIN.size + length
    try:
        head = json.loads(bytes(body[_BEGIN.size : content]))
        found = BundleFile(**head)._replace(name=bytes.fromhex(head["name"]))
        if not isinstance(found.num_blocks, int) or not isinstance(found.origin, str | None):
            raise TypeError("not what `begin` writes")
    except (ValueError, TypeError, KeyError):
        raise DamagedFileError("its head cannot be read") from None
    return found, body[content:]


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
