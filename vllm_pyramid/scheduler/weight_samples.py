# SPDX-License-Identifier: Apache-2.0
"""Tell the weights in a folder from others by samples of what its files hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

_WHOLE = 1 << 20  # bytes of the files that are read whole
_SAMPLE = 64  # bytes of a sample
_SAMPLES = 256  # of a large file that names no tensors
_LENGTH = 8  # bytes that hold the length of a safetensors header
_LONGEST_HEADER = 100_000_000


def weight_samples(folder: Path) -> list[tuple[str, int, int, str]]:
    """Return name, size, time and a hash of samples for each file below a folder, links followed.

    Of a safetensors file these are its header, and the first, middle and last bytes of each tensor;
    small files are read whole; of other files samples are taken at equal distances. The time of a
    file tells weights that were changed where no sample lies.
    """
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                stat = path.stat()
                sample = _digest(path, stat.st_size)
                name = str(path.relative_to(folder))
                found.append((name, stat.st_size, stat.st_mtime_ns, sample))
    return sorted(found)


def _digest(path: Path, size: int) -> str:
    digest = sha256()
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for start, count in _places(file, size, path.suffix == ".safetensors"):
                file.seek(start)
                digest.update(file.read(count))
    return digest.hexdigest()


def _places(file: BinaryIO, size: int, has_header: bool) -> Iterator[tuple[int, int]]:
    """Yield start and length of what is read of a large file."""
    header = int.from_bytes(file.read(_LENGTH), "little") if has_header else 0
    if not 0 < header < min(size - _LENGTH, _LONGEST_HEADER):
        yield from ((size * index // _SAMPLES, _SAMPLE) for index in range(_SAMPLES))
        yield max(size - _SAMPLE, 0), _SAMPLE
        return
    tensors = json.loads(file.read(header))
    first = _LENGTH + header
    yield 0, first
    for tensor in tensors.values():
        start, end = tensor.get("data_offsets", (0, 0))
        for place in (start, (start + end) // 2, max(end - _SAMPLE, start)):
            yield first + place, min(_SAMPLE, end - place)
