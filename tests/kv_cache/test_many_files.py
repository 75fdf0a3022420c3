# SPDX-License-Identifier: Apache-2.0
"""A folder of many files: what a start, a step and the memory of the scheduler do with it."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.core.kv_cache_utils import BlockHash

from tests.kv_cache.test_host_files import Server, paths
from tests.worker.test_host_pool import LAYERS, SLOTS
from vllm_pyramid.compat.side_channel import HostFill
from vllm_pyramid.kv_cache import host_cache, host_files, old_files
from vllm_pyramid.step.hooks import HostMemory


def _with_files(folder: Path, names: list[BlockHash]) -> Server:
    """An engine that has written a file for each bundle."""
    server = Server(folder)
    server.wait_in(HostMemory(2**20))
    server.put(*((name, 0) for name in names))
    return server


def test_files_are_counted_in_steps_and_looked_up_before(tmp_path, monkeypatch) -> None:
    """A start does not wait for a folder of many files, and what it has is found at once."""
    names = [BlockHash(bytes([i]) * 32) for i in range(20)]
    server = _with_files(tmp_path, names)
    size = server.files.used_bytes // len(names) + 1
    server.killed()
    monkeypatch.setattr(host_files, "_START_S", 0.0)
    monkeypatch.setattr(host_files, "_PER_STEP", 3)
    again = Server(tmp_path, limit=10 * size)
    assert again.files.num_files == 0 and all(name in again.files for name in names)
    assert again.host.longest_prefix(names[:2]) == 2  # known before it is counted
    again.save(BlockHash(bytes([98]) * 32), 0)
    assert again.files.num_files == 3
    steps = 0
    while not again.files._old.is_counted:
        again.step()
        steps += 1
    assert 5 <= steps <= 8, "each step looks at some"
    again.written()
    assert again.files.num_files == 21
    assert again.files.used_bytes == sum(path.stat().st_size for path in paths(tmp_path))
    assert again.put((BlockHash(bytes([99]) * 32), 3)) == 0  # now the limit holds again
    assert len(paths(tmp_path)) == 10 == again.files.num_files
    assert again.files.used_bytes == sum(path.stat().st_size for path in paths(tmp_path))
    assert names[0] in again.files and BlockHash(bytes([99]) * 32) in again.files
    again.killed()


def test_what_is_remembered_of_files_is_bounded(tmp_path, monkeypatch) -> None:
    """The least recently used file goes first, although most are not remembered."""
    monkeypatch.setattr(host_files, "MOST_KNOWN", 4)
    monkeypatch.setattr(old_files, "MOST_REMEMBERED", 4)
    names = [BlockHash(bytes([i]) * 32) for i in range(24)]
    server = Server(tmp_path)
    server.wait_in(HostMemory(2**20))
    for index, name in enumerate(names):
        server.put((name, 0))
        os.utime(server.files._path(name), (1000 + index, 1000 + index))
        assert len(server.files._known) <= 4
    assert all(name in server.files for name in names) and server.files.num_files == 24
    size = server.files.used_bytes // 24
    server.files._limit = 24 * size
    for index in range(12):
        name = BlockHash(bytes([100 + index]) * 32)
        for _ in range(3):  # a refused bundle is offered again when it is idle again
            server.save(name, 0)
            server.step()
        server.written()
        if name in server.files:
            os.utime(server.files._path(name), (2000 + index, 2000 + index))
        assert len(server.files._old._oldest) <= 4 and len(server.files._old._found) <= 4
        assert server.files.used_bytes <= server.files._limit
    left = [index for index, name in enumerate(names) if name in server.files]
    assert left == list(range(24 - len(left), 24)) and len(left) < 16, "the oldest went"
    assert server.files.used_bytes == sum(path.stat().st_size for path in paths(tmp_path))
    server.killed()


def test_a_step_reads_so_much_and_the_next_ones_read_on(tmp_path, monkeypatch) -> None:
    names = [BlockHash(bytes([i]) * 32) for i in range(5)]
    server = _with_files(tmp_path, names)
    monkeypatch.setattr(host_cache, "MOST_READ", LAYERS * server.page + 1)  # two bundles of three
    wanted, found, read = names[:3], [], [0]
    while True:
        found.append(server.host.longest_prefix(wanted))
        waits = server.host.must_wait()
        assert server.host.longest_prefix(names[3:]) == 0 or not waits, "others read nothing now"
        copies = server.step()
        read.append(sum(isinstance(copy, HostFill) for copy in copies.stored))
        if not waits:
            break
    assert found == [2, 3] and max(read) == 2
    assert server.host.longest_prefix(wanted) == 3 and not server.host.must_wait()
    server.step()
    # What is always pushed out again is not waited for without end.
    waits = 0
    monkeypatch.setattr(host_cache, "MOST_READ", 1)
    while server.host.longest_prefix(names[:2]) < 3 and server.host.must_wait():
        waits += 1
        server.step()
        server.host._table.clear()
        server.host._entries.clear()
        server.host._names.clear()
    assert waits <= SLOTS
    server.killed()
