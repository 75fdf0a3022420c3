# SPDX-License-Identifier: Apache-2.0
"""Bundles in files: they come back to the byte after a restart, and whatever is wrong is a miss."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import BlockHash

from tests.kv_cache.test_host_cache import blocks
from tests.kv_cache.test_two_tiers import FullDisk
from tests.worker.test_host_pool import BLOCKS, LAYERS, SLOTS, caches, specs
from vllm_pyramid.compat.side_channel import HostFill
from vllm_pyramid.kv_cache import bundle_file
from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.kv_cache.host_files import HostFiles
from vllm_pyramid.step.hooks import HostMemory
from vllm_pyramid.worker import file_writer
from vllm_pyramid.worker.host_pool import HostPool

NAME, OTHER = BlockHash(bytes(range(32))), BlockHash(bytes(range(32, 0, -1)))


class Server:
    """Both sides of a host cache with a folder, and the blocks of each worker's device.

    Args:
        stages: layers of each pipeline stage, which has `ranks` workers.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        ranks: int = 1,
        stages: tuple[int, ...] = (LAYERS,),
        **changes: Any,
    ) -> None:
        of = specs(dtype, changes.pop("head_size", 8))
        self.page = of[0].page_size_bytes
        num_bytes = SLOTS * LAYERS * self.page
        ends = list(accumulate(stages))
        layers = [slice(end - size, end) for size, end in zip(stages, ends, strict=True)]
        layers = [part for part in layers for _ in range(ranks)]
        args = {"namespace": "one", "block_bytes": self.page, "limit": 2**20, **changes}
        if len(stages) > 1:
            args["parts"] = layers
        elif ranks > 1:
            args["parts"] = [slice(None)] * ranks
        self.files = HostFiles(str(folder), largest=num_bytes, patience=0.5, **args)
        self.host = HostCache(SLOTS, LAYERS, self.files)
        self.pools, self.all_pages = [], []
        for number, part in enumerate(layers):
            pool, kv_caches = HostPool(num_bytes, of[part], HostMemory, number), caches(of)
            pool.bind(kv_caches, BLOCKS)
            self.pools.append(pool)
            self.all_pages.append(kv_caches[0].view(torch.uint8).view(BLOCKS, -1))
        self.pool, self.pages = self.pools[0], self.all_pages[0]

    def step(self) -> Any:
        """Do what a step does, by its message as a worker receives it."""
        output: Any = SimpleNamespace(new_block_ids_to_zero=None)
        copies = self.host.take_message()
        for pool in self.pools if copies is not None else ():
            received = pickle.loads(pickle.dumps(copies))
            pool.store(received)
            pool.load(received.loaded, output)
        return copies

    def wait_in(self, memory: HostMemory) -> None:
        """Let the first worker's blocks wait for files in other memory."""
        args = self.pool._part, self.pool._layers, self.pool.transfer
        self.pool.writer = file_writer.FileWriter(memory, *args)

    def save(self, name: bytes, first: int, count: int = LAYERS, origin: Any = None) -> None:
        self.files.save(idle(name, first, count, origin))

    def put(self, *bundles: tuple[bytes, int]) -> int:
        """Save names from their first blocks on, do a step, and wait for the files."""
        for name, first in bundles:
            self.save(name, first)
        self.step()
        return self.written()

    def written(self) -> int:
        """Wait for all files; return how many could not be written."""
        failed = 0
        for pool in self.pools:
            writer, pool.writer = pool.writer, None
            if writer is None:  # nothing was ordered
                continue
            writer.finish()
            failed += writer.take_failed()
        return failed

    def killed(self) -> None:
        self.files.close()


def idle(name: bytes, first: int, count: int = LAYERS, origin: Any = None) -> BlockBundle:
    bundle = BlockBundle(BlockHash(name), blocks(first, count), refs=0)
    bundle.scheduled, bundle.origin = True, origin
    return bundle


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("vllm-pyramid/*/??/*"))


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.bfloat16, 8), (torch.uint8, 3)])
def test_every_byte_comes_back_after_a_restart(tmp_path, dtype, head_size) -> None:
    """A prefix and a state of several slots, of each type of cache."""
    first = Server(tmp_path, dtype, head_size=head_size)
    before, state = first.pages.clone(), BlockHash(NAME + b"@key")
    first.save(NAME, 0)
    first.save(state, 5, LAYERS + 2, "who evicted")
    first.step()
    first.pages.fill_(0)  # the step overwrites what the thread writes
    assert first.written() == 0
    first.killed()
    again = Server(tmp_path, dtype, head_size=head_size)
    host = again.host
    assert NAME in host and host.longest_prefix([NAME, BlockHash(b"unknown")]) == 1
    assert host.longest_prefix([state]) == 1 and host.origin(state) == "who evicted"
    host.load(NAME, blocks(9, LAYERS))
    host.load(state, blocks(1, LAYERS + 2))
    copies = again.step()
    assert sum(isinstance(copy, HostFill) for copy in copies.stored) == 3
    assert torch.equal(again.pages[9:12], before[:3])
    assert torch.equal(again.pages[1:6], before[5:10])
    assert again.files.counters.read == (2 * LAYERS + 2) * again.page
    assert host.longest_prefix([NAME, state]) == 2
    assert again.step() is None, "it is in memory now, and not read again"
    again.killed()


RANKS: list[dict[str, Any]] = [{"ranks": 2}, {"ranks": 2, "stages": (1, 2)}]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_gets_its_own_bytes_back(tmp_path: Path, ranks: dict[str, Any]) -> None:
    """Tensor-parallel ranks have other bytes of the same blocks, stages blocks of other layers."""
    first = Server(tmp_path, **ranks)
    before = [pages.clone() for pages in first.all_pages]
    assert first.put((NAME, 0)) == 0
    assert first.files.used_bytes == sum(path.stat().st_size for path in paths(tmp_path))
    first.killed()
    again = Server(tmp_path, **ranks)
    assert again.files.num_files == 1 and again.files.used_bytes == first.files.used_bytes
    assert again.host.longest_prefix([NAME]) == 1
    again.host.load(NAME, blocks(6, LAYERS))
    for pages in again.all_pages:
        pages.fill_(0)
    again.step()
    for pool, pages, saved in zip(again.pools, again.all_pages, before, strict=True):
        own = list(range(LAYERS))[pool._layers]
        assert torch.equal(pages[6:9][own], saved[:3][own])
        assert pages.any(dim=1).sum() == len(own), "nothing but the blocks of its layers"
    again.killed()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("damage", ["missing", "cut", "of another order", "of another rank"])
def test_a_part_that_is_wrong_is_a_miss_for_all(tmp_path, ranks, damage) -> None:
    server = Server(tmp_path, **ranks)
    server.put((NAME, 0), (OTHER, 3))
    one = Path(server.files._path(NAME))
    second = one.with_name(one.name + ".1")
    old = second.read_bytes()
    assert one.exists() and len(paths(tmp_path)) == 2 * len(server.pools)
    if damage == "missing":
        second.unlink()
    elif damage == "cut":
        cut(second)
    elif damage == "of another rank":
        second.write_bytes(one.read_bytes())
    else:  # the bytes of a bundle that was computed at another time are those of another batch
        server.files._drop(str(one))
        server.put((NAME, 0))
        assert second.read_bytes() != old
        second.write_bytes(old)
    assert server.host.longest_prefix([NAME]) == 0
    assert server.host.longest_prefix([OTHER]) == 1
    assert server.files.counters.damaged == (damage != "missing")
    server.step()
    server.written()
    assert len(paths(tmp_path)) == len(server.pools), "no part is left"
    assert server.files.used_bytes == sum(path.stat().st_size for path in paths(tmp_path))
    server.killed()


def test_what_one_rank_had_not_written_is_removed_at_the_next_start(tmp_path: Path) -> None:
    server = Server(tmp_path, ranks=2)
    server.put((NAME, 0), (OTHER, 3))
    server.killed()
    Path(server.files._path(NAME)).unlink()
    again = Server(tmp_path, ranks=2)
    assert again.files.num_files == 1 and NAME not in again.host and OTHER in again.host
    assert len(paths(tmp_path)) == 2
    again.killed()
    other = Server(tmp_path, namespace="of one rank", limit=2000)  # it makes room
    assert other.put((NAME, 0)) == 0
    (left,) = paths(tmp_path)
    assert left.is_relative_to(other.files._own)
    other.killed()


def test_only_the_owner_reads(tmp_path: Path) -> None:
    server = Server(tmp_path / "new" / "folder")
    server.put((NAME, 0))
    (path,) = paths(tmp_path / "new" / "folder")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.killed()
    path.parent.parent.parent.chmod(0o750)
    with pytest.raises(ValueError, match="open to other users: chmod 700"):
        Server(tmp_path / "new" / "folder")


def test_two_engines_do_not_share_a_folder(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with pytest.raises(ValueError, match=r"another engine uses .*: give each engine"):
        Server(tmp_path)
    server.killed()
    Server(tmp_path).killed()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def nearly_all(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def later_format(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12] += 1
    path.write_bytes(data)


def good_file_of(namespace: str, name: bytes, count: Any) -> Callable[[Path], None]:
    """Return what writes a good file of another namespace, bundle or count under a file's name."""

    def damage(path: Path) -> None:
        begin = bundle_file.BundleFile(namespace, name, count, None).begin()
        bundle_file.write_file(str(path), begin, path.read_bytes()[-32 - 1536 : -32])

    return damage


def a_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def too_large(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**20)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        *(flip, cut, nearly_all, nothing, later_format, a_link, too_large, a_folder),
        pytest.param(good_file_of("one", bytes(32), LAYERS), id="another"),
        pytest.param(good_file_of("two", NAME, LAYERS), id="elsewhere"),
        pytest.param(good_file_of("one", NAME, LAYERS - 1), id="fewer blocks"),
        pytest.param(good_file_of("one", NAME, str(LAYERS)), id="text for a number"),
    ],
)
def test_damage_is_a_miss(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    server.put((NAME, 0), (OTHER, 3))
    assert server.page * LAYERS == 1536, "what the kinds of damage expect"
    (path,) = (path for path in paths(tmp_path) if path == Path(server.files._path(NAME)))
    damage(path)
    for _ in range(2):
        assert server.host.longest_prefix([NAME]) == 0
    assert server.files.counters.damaged == 1 and NAME not in server.host
    assert server.host.longest_prefix([OTHER]) == 1, "the others are read"
    server.step()
    server.save(NAME, 0)  # it is written again
    server.step()
    if damage is not a_folder:
        assert server.written() == 0 and server.host.longest_prefix([NAME]) == 1
    server.killed()


def test_other_namespaces_are_not_read_and_go_first(tmp_path: Path) -> None:
    """Of another model or version; the limit is on all files together."""
    old = Server(tmp_path, namespace="old")
    old.put((NAME, 0))
    size = old.files.used_bytes
    old.killed()
    new = Server(tmp_path, limit=2 * size)
    assert new.files.num_files == 1 and NAME not in new.host
    assert new.put((NAME, 0), (OTHER, 3)) == 0
    assert new.files.counters.evictions == 1
    assert all(path.is_relative_to(new.files._own) for path in paths(tmp_path))
    assert len(paths(tmp_path)) == 2
    new.killed()


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    names = [BlockHash(bytes([i]) * 32) for i in range(4)]
    server = Server(tmp_path)
    server.save(names[0], 0)
    size = server.files.used_bytes
    server.killed()
    server = Server(tmp_path, limit=3 * size)
    for name in names[:3]:
        server.put((name, 0))
    assert server.host.longest_prefix(names[:1]) == 1  # it is read, so it is used
    server.save(names[3], 3)
    assert [name in server.files for name in names] == [True, False, True, True]
    server.step()
    server.written()
    assert server.files.used_bytes == 3 * size
    assert sum(path.stat().st_size for path in paths(tmp_path)) == 3 * size
    server.killed()
    times = [Path(server.files._path(name)) for name in (names[0], names[2], names[3])]
    for age, path in enumerate(times):
        os.utime(path, (1000 - age, 1000 - age))
    again = Server(tmp_path, limit=2 * size)  # by the times of the files, after a restart
    assert [name in again.files for name in names] == [True, False, True, False]
    again.killed()
    none = Server(tmp_path, limit=size - 1)
    none.save(NAME, 0)
    assert none.step() is None or none.files.counters.unwritten == 1
    assert none.files.used_bytes == 0
    none.killed()


def test_a_full_disk_is_a_miss(tmp_path, monkeypatch, caplog) -> None:
    """No file, no half file, and the step does not fail."""

    @contextmanager
    def opened(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with open(*args, **kwargs) as file:
            yield FullDisk(file)

    server = Server(tmp_path)
    monkeypatch.setattr(bundle_file, "open", opened, raising=False)
    assert server.put((NAME, 0), (OTHER, 3)) == 2
    assert not paths(tmp_path)
    server.files.failed_to_write(2)
    monkeypatch.undo()
    assert server.host.longest_prefix([NAME]) == 0
    assert server.files.counters.damaged == 0 and server.files.counters.unwritten == 2
    server.killed()


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch) -> None:
    """Its files are read; what would be written is counted. (Tests may run as root.)"""
    server = Server(tmp_path)
    server.put((NAME, 0))
    server.killed()

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuses)
    monkeypatch.setattr(os, "unlink", refuses)
    monkeypatch.setattr(os, "utime", refuses)
    again = Server(tmp_path)
    assert again.host.longest_prefix([NAME]) == 1
    again.step()
    again.save(OTHER, 0)
    again.save(NAME, 0)
    assert again.step() is None and again.files.counters.unwritten == 1
    (path,) = paths(tmp_path)
    assert path.exists()


def test_what_waits_for_a_slow_disk_is_limited(tmp_path, monkeypatch) -> None:
    """The beginning of a prompt is written, the rest is not."""
    names = [BlockHash(bytes([i]) * 32) for i in range(4)]
    server = Server(tmp_path)
    server.wait_in(HostMemory(2 * LAYERS * server.page))
    # The deepest become idle first.
    assert server.put(*((name, 0) for name in reversed(names))) == 2
    assert [server.host.longest_prefix([name]) for name in names] == [1, 1, 0, 0]
    server.killed()


def test_a_reset_forgets_the_files(tmp_path: Path) -> None:
    """Those on their way to the disk too; nothing is written afterwards, as weights may differ."""
    server = Server(tmp_path)
    server.save(NAME, 0)
    server.step()
    server.save(OTHER, 3)
    server.host.clear()
    assert NAME not in server.host and server.files.used_bytes == 0
    server.save(NAME, 0)
    copies = server.step()
    assert copies.files.removed and not copies.files.saved
    server.written()
    assert not paths(tmp_path)
    server.killed()
    again = Server(tmp_path)
    assert again.files.num_files == 0
    again.killed()


def test_the_prefix_found_so_far_is_not_pushed_out_by_what_is_read(tmp_path: Path) -> None:
    """There are four slots: of five bundles in files the first four are found."""
    names = [BlockHash(bytes([i]) * 32) for i in range(5)]
    server = Server(tmp_path)
    server.wait_in(HostMemory(5 * LAYERS * server.page))
    for index, name in enumerate(names):
        server.save(name, index)
    server.step()
    server.written()
    before = server.pages.clone()
    assert server.host.longest_prefix(names) == SLOTS
    server.pages.fill_(0)
    for index, name in enumerate(names[:SLOTS]):
        server.host.load(name, blocks(index * 2, LAYERS))
    server.step()
    assert torch.equal(server.pages[6:9], before[3:6]) and server.host.used_slots == SLOTS
    assert server.host.longest_prefix(names[4:]) == 1, "the next step may push one out"
    server.step()
    server.killed()
