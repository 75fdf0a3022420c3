# SPDX-License-Identifier: Apache-2.0
"""Measure how a host cache's folder of many files is opened, looked up in, and read from.

    python scripts/bench_folder.py --files 100000 --hit-mib 512

Prints the seconds until the folder is open, those until all files are counted, the bytes of memory
that each file takes afterwards, and the microseconds of a lookup; then the longest pause of a step,
the seconds in all and the most memory while a hit of bundles of 1 MiB is read, as it is and in one
step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import tracemalloc
from hashlib import sha256
from pathlib import Path

from vllm.v1.core.kv_cache_utils import BlockHash

from vllm_pyramid.kv_cache import host_cache
from vllm_pyramid.kv_cache.bundle_file import BundleFile, write_file
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.kv_cache.host_files import HostFiles

_LOOKUPS = 2000
_LAYERS, _BLOCK = 16, 1 << 16  # of a bundle of 1 MiB


def names(count: int) -> list[bytes]:
    """Return names of bundles."""
    return [number.to_bytes(32, "big") for number in range(count)]


def fill(folder: Path, count: int) -> None:
    """Write small files under the names of bundles of the namespace `one`."""
    for name in names(count):
        digest = sha256(name).hexdigest()
        path = folder / "vllm-pyramid" / "one" / digest[:2] / f"{digest}.kv"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(bytes(64))
    (folder / "vllm-pyramid").chmod(0o700)


def read_hit(folder: str, count: int) -> None:
    """Write `count` bundles and read them, in steps and in one."""
    files = HostFiles(folder, "one", _BLOCK, 1 << 40, 1 << 30)
    wanted = [BlockHash(name) for name in names(count)]
    for name in wanted:
        digest = sha256(name).hexdigest()
        path = Path(folder) / "vllm-pyramid" / "one" / digest[:2] / f"{digest}.kv"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        begin = BundleFile("one", name, _LAYERS, None).begin()
        write_file(str(path), begin, os.urandom(_LAYERS * _BLOCK))
    for most in (host_cache.MOST_READ, 1 << 60):
        host_cache.MOST_READ = most
        host, pauses = HostCache(count, _LAYERS, files), []
        tracemalloc.start()
        waits = True
        while waits:
            begin_step = time.perf_counter()
            found = host.longest_prefix(wanted)
            waits = host.must_wait()
            host.take_message()
            pauses.append(time.perf_counter() - begin_step)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        print(
            f"{found} bundles of 1 MiB in {len(pauses)} steps: {max(pauses):.2f} s at most in one, "
            f"{sum(pauses):.2f} s in all, {peak:.0f} MiB of memory at most"
        )


def main() -> None:
    """Measure once; files are in the page cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--hit-mib", type=int, default=512)
    args = parser.parse_args()
    count = args.files
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), count)
        begin = time.perf_counter()
        files = HostFiles(folder, "one", 64, 1 << 40, 1 << 20)
        opened = time.perf_counter() - begin
        steps = 0
        begin_steps = time.perf_counter()
        while files.num_files < count:
            files.take()
            steps += 1
        rest = time.perf_counter() - begin_steps
        begin = time.perf_counter()
        found = sum(name in files for name in names(_LOOKUPS))
        looked_up = (time.perf_counter() - begin) / _LOOKUPS
        files.close()
        tracemalloc.start()
        files = HostFiles(folder, "one", 64, 1 << 40, 1 << 20)
        while files.num_files < count:
            files.take()
        held = tracemalloc.get_traced_memory()[0] / count
        tracemalloc.stop()
        files.close()
    print(
        f"{count} files: open after {opened:.2f} s; counted in {steps} steps, {rest:.2f} s in all; "
        f"{held:.0f} bytes of memory a file; a lookup takes {looked_up * 1e6:.1f} us "
        f"({found} of {_LOOKUPS} found)"
    )
    with tempfile.TemporaryDirectory() as folder:
        read_hit(folder, args.hit_mib)


if __name__ == "__main__":
    main()
