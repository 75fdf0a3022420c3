# SPDX-License-Identifier: Apache-2.0
"""Blocks that go to host memory and come back: every byte, in the order of a step's copies."""

from __future__ import annotations

import pickle
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import _custom_ops
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from tests.plumbing import stand_ins
from tests.pretended_device import PretendedDevice
from vllm_pyramid.compat.side_channel import (
    TIER,
    FileOrders,
    FileSave,
    HostCopies,
    HostCopy,
    HostFill,
    attach_messages,
    read_messages,
)
from vllm_pyramid.kv_cache.bundle_file import BundleFile, read_file
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec
from vllm_pyramid.step.hooks import HostMemory
from vllm_pyramid.worker.block_copies import copy_blocks
from vllm_pyramid.worker.file_writer import Ring
from vllm_pyramid.worker.host_pool import HostPool, waiting_bytes

LAYERS, BLOCKS, SLOTS = 3, 12, 4


def specs(dtype: torch.dtype, head_size: int = 8) -> list[LayerKVCacheSpec]:
    return [
        LayerKVCacheSpec(
            block_size=4,
            num_kv_heads=2,
            head_size=head_size,
            dtype=dtype,
            layer_idx=layer,
            num_layers=LAYERS,
            model_layer=layer,
        )
        for layer in range(LAYERS)
    ]


def caches(of: list[LayerKVCacheSpec]) -> list[torch.Tensor]:
    """Views of one memory, one for each layer, of random bytes."""
    size = of[0].page_size_bytes
    memory = torch.randint(0, 256, (BLOCKS * size,), dtype=torch.uint8)
    shape = (BLOCKS, 2, 4, 2, of[0].head_size)
    return [memory.view(spec.dtype).view(shape) for spec in of]


def step(stored: list[Any], loaded: list[HostCopy], copies: Any = None, files: Any = None) -> Any:
    """A step's message, as a worker receives it."""
    output: Any = SimpleNamespace(kv_cache_block_copies=copies, new_block_ids_to_zero=None)
    attach_messages(output, {TIER: HostCopies(stored, loaded, files)})
    return pickle.loads(pickle.dumps(output))


def store(pool: HostPool, output: Any) -> None:
    pool.store(read_messages(output)[TIER])


def load(pool: HostPool, output: Any) -> None:
    pool.load(read_messages(output)[TIER].loaded, output)


@pytest.fixture(params=["host", "copy engines"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """None, or a stream that copies as late as it may; both memories are the host's."""
    monkeypatch.setattr(_custom_ops, "swap_blocks_batch", stand_ins.move_bytes)
    stand_ins.COUNTS.clear()
    return None if request.param == "host" else stand_ins.LateCopies()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("dtype", "head_size"), [(torch.bfloat16, 8), (torch.uint8, 3)])
def test_every_byte_comes_back(dtype, head_size, inference, stream) -> None:
    """Blocks of a number of bytes that is no whole number of words, too."""
    of = specs(dtype, head_size)
    num_bytes = SLOTS * LAYERS * of[0].page_size_bytes
    pool, kv_caches = HostPool(num_bytes + 5, of, HostMemory, stream=stream), caches(of)
    assert pool.slots.shape == (SLOTS, LAYERS, of[0].page_size_bytes)
    pool.bind(kv_caches, BLOCKS)
    pages = kv_caches[0].view(torch.uint8).view(BLOCKS, -1)
    before = pages.clone()
    with torch.inference_mode(inference):
        store(pool, step([HostCopy(2, [5, 1, 9]), HostCopy(0, [7])], []))
        pages.fill_(0)
        load(pool, step([], [HostCopy(2, [3, 4, 8]), HostCopy(0, [11])]))
    expected = torch.zeros_like(before)
    expected[[3, 4, 8, 11]] = before[[5, 1, 9, 7]]
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("head_size", [8, 3])
@pytest.mark.parametrize("methods", [1, 2])
def test_what_methods_keep_beside_blocks_goes_with_them(methods, head_size, stream) -> None:
    """Behind each block of a slot; that of other blocks stays as it is. One batch each way."""
    of = specs(torch.bfloat16, head_size)
    extra_bytes = methods * 2 * head_size * 2
    num_bytes = SLOTS * LAYERS * (of[0].page_size_bytes + extra_bytes)
    made = {"extra_bytes": extra_bytes, "stream": stream}
    pool, kv_caches = HostPool(num_bytes, of, HostMemory, **made), caches(of)
    assert pool.slots.shape == (SLOTS, LAYERS, of[0].page_size_bytes + extra_bytes)
    extras = [torch.randn(BLOCKS, 2, head_size).bfloat16() for _ in range(methods)]
    pool.bind(kv_caches, BLOCKS, extras)
    pages = kv_caches[0].view(torch.uint8).view(BLOCKS, -1)
    memories = [pages, *extras]
    before = [memory.clone() for memory in memories]
    store(pool, step([HostCopy(2, [5, 1, 9]), HostCopy(0, [7])], []))
    for memory in memories:
        memory.fill_(0)
    load(pool, step([], [HostCopy(2, [3, 4, 8]), HostCopy(0, [11])]))
    expected = [torch.zeros_like(known) for known in before]
    for memory, known, found in zip(memories, before, expected, strict=True):
        found[[3, 4, 8, 11]] = known[[5, 1, 9, 7]]
        assert torch.equal(memory, found)
    if stream is not None:
        assert stream.launched == stand_ins.COUNTS["batches of copies"] == 2
        assert stand_ins.COUNTS["copies in batches"] == 2 * 4 * (1 + methods)
    with pytest.raises(RuntimeError, match="has room for"):
        pool.bind(kv_caches, BLOCKS)


def test_a_step_copies_out_then_on_the_device_then_in(stream: Any) -> None:
    """Blocks that are stored may take copies in the same step, and others what was just stored."""
    of = specs(torch.float32)
    num_bytes = SLOTS * LAYERS * of[0].page_size_bytes
    pool, kv_caches = HostPool(num_bytes, of, HostMemory, stream=stream), caches(of)
    pool.bind(kv_caches, BLOCKS)
    pages = kv_caches[0].view(torch.uint8).view(BLOCKS, -1)
    before = pages.clone()
    stored = [HostCopy(1, [1, 2, 3]), HostCopy(0, [4, 5, 6]), HostCopy(0, [7, 8, 9])]
    output = step(stored, [HostCopy(1, [7, 8, 9])], [KVCacheBlockCopy(10, 1)])
    output.new_block_ids_to_zero = [1, 7, 2, 9]
    store(pool, output)
    copy_blocks(output, 0, kv_caches, BLOCKS, of[0].page_size_bytes)
    load(pool, output)
    assert output.new_block_ids_to_zero == [2], "what was filled is not zeroed afterwards"
    expected = before.clone()
    expected[1] = before[10]
    expected[[7, 8, 9]] = before[[1, 2, 3]]
    assert torch.equal(pages, expected)
    assert torch.equal(pool.slots[0], before[[7, 8, 9]]), "the last one that got the slot"


def test_a_worker_of_a_pipeline_stage_copies_the_blocks_of_its_layers() -> None:
    """Stages have as many slots, whatever their layers; each takes its part of every order."""
    of = specs(torch.float32)
    size = of[0].page_size_bytes
    before, after = [], []
    pools = [HostPool(SLOTS * LAYERS * size, part, HostMemory) for part in (of[:1], of[1:])]
    assert [pool.slots.shape for pool in pools] == [(SLOTS, 1, size), (SLOTS, 2, size)]
    for pool in pools:
        kv_caches = caches(of)
        pool.bind(kv_caches, BLOCKS)
        pages = kv_caches[0].view(torch.uint8).view(BLOCKS, -1)
        before.append(pages.clone())
        store(pool, step([HostCopy(2, [5, 1, 9])], []))
        pages.fill_(0)
        output = step([], [HostCopy(2, [3, 4, 8])])
        output.new_block_ids_to_zero = [3, 4, 8]
        load(pool, output)
        after.append((pages, output.new_block_ids_to_zero))
    (lower, zero_below), (upper, zero_above) = after
    assert torch.equal(lower[3], before[0][5]) and not lower[[4, 8]].any()
    assert torch.equal(upper[[4, 8]], before[1][[1, 9]]) and not upper[3].any()
    assert (zero_below, zero_above) == ([4, 8], [3]), "blocks of another stage's pool"


@pytest.mark.parametrize("stream", ["copy engines"], indirect=True)
def test_no_copy_waits_for_the_device(tmp_path: Path, stream: Any) -> None:
    """On a pretended device: out to host memory and to a file, from a file, and in."""
    of = specs(torch.bfloat16)
    size = of[0].page_size_bytes
    pages = torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8)
    beside = torch.randint(0, 256, (BLOCKS, 32), dtype=torch.uint8)
    whole = torch.cat([pages, beside], 1)
    path = tmp_path / "aa" / "bundle.kv"
    begin = BundleFile("one", bytes(32), LAYERS, None).begin()
    orders = FileOrders([str(tmp_path / "gone.kv")], [FileSave(str(path), [begin], [5, 1, 9])])
    (tmp_path / "gone.kv").write_bytes(b"old")
    with PretendedDevice() as device:

        def allocate(num_bytes: int) -> Any:
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
            return SimpleNamespace(bytes=device.put(memory), host=memory)

        num_bytes = SLOTS * LAYERS * whole.shape[1]
        pool = HostPool(num_bytes, of, allocate, extra_bytes=32, stream=stream)
        pool.transfer.bind([pages, beside])  # which are copied by their addresses alone
        store(pool, step([HostCopy(2, [4, 7])], [], files=orders))
        assert stream.launched == 2, "to the slots, and to the memory in which files wait"
        pages.fill_(0)
        beside.fill_(0)
        fill = HostFill(0, [whole[[0, 2, 3]].numpy().tobytes()])
        output = step([fill], [HostCopy(2, [1, 2]), HostCopy(0, [6, 8, 10])])
        store(pool, output)
        load(pool, output)
        assert stream.launched == stand_ins.COUNTS["batches of copies"] == 3
        assert pool.writer is not None
        pool.writer.finish()
    assert device.waits == []
    expected = torch.zeros_like(whole)
    expected[[1, 2, 6, 8, 10]] = whole[[4, 7, 0, 2, 3]]
    assert torch.equal(torch.cat([pages, beside], 1), expected)
    _, content = read_file(str(path), 1 << 20)
    assert bytes(content) == whole[[5, 1, 9]].numpy().tobytes(), "as it was before the step"
    assert pool.writer.take_failed() == 0 and not (tmp_path / "gone.kv").exists()


def test_memory_that_is_too_small_or_of_another_layout() -> None:
    of = specs(torch.float32)
    size = of[0].page_size_bytes
    with pytest.raises(
        ValueError, match=r"--kv-host-cache is too small: .* take 0.00146 MiB; raise it"
    ):
        HostPool(LAYERS * size - 1, of, HostMemory)
    pool = HostPool(LAYERS * size, of, HostMemory)
    apart = [torch.zeros(BLOCKS * size, dtype=torch.uint8).view(BLOCKS, -1) for _ in of]
    with pytest.raises(RuntimeError, match="--kv-host-cache copies blocks"):
        pool.bind(apart, BLOCKS)
    values_behind = torch.zeros(2, BLOCKS, size // 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="None: in several places"):
        pool.bind([values_behind], BLOCKS)


def test_what_waits_for_files_has_memory_of_its_own(tmp_path: Path) -> None:
    """It is reserved at the start with a folder, and what is written takes no other."""
    of = specs(torch.float32)
    size = of[0].page_size_bytes
    asked: list[int] = []

    def allocate(num_bytes: int) -> HostMemory:
        asked.append(num_bytes)
        return HostMemory(num_bytes)

    num_bytes = SLOTS * LAYERS * size
    HostPool(num_bytes, of, allocate, has_files=False)
    assert asked == [num_bytes]
    pool, kv_caches = HostPool(num_bytes, of, allocate), caches(of)
    assert asked[1:] == [num_bytes, waiting_bytes(num_bytes)]
    pool.bind(kv_caches, BLOCKS)
    begin = BundleFile("one", bytes(32), LAYERS, None).begin()
    paths = [str(tmp_path / "aa" / f"{number}.kv") for number in range(SLOTS + 2)]
    saves = [FileSave(path, [begin], [5, 1, 9]) for path in paths]
    pages = kv_caches[0].view(torch.uint8).view(BLOCKS, -1)
    assert pool._waiting is not None and not pool._waiting.host.any()
    store(pool, step([], [], files=FileOrders([], saves)))
    wanted = pages[[5, 1, 9]].flatten().repeat(SLOTS)
    assert torch.equal(pool._waiting.host, wanted), "all that fits is in it"
    assert pool.writer is not None
    pool.writer.finish()
    assert pool.writer.take_failed() == 2
    assert [Path(path).exists() for path in paths] == [True] * SLOTS + [False] * 2


@given(sizes=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=80))
def test_parts_of_a_ring_never_overlap(sizes: list[tuple[int, bool]]) -> None:
    ring, taken = Ring(100), deque[tuple[int, int]]()
    for size, gives_back in sizes:
        start = ring.take(size)
        if start is not None:
            assert 0 <= start <= 100 - size
            assert all(end <= start or start + size <= first for first, end in taken)
            taken.append((start, start + size))
        else:
            assert taken, "an empty memory has room"
        if gives_back and taken:
            ring.give_back()
            taken.popleft()
    while taken:
        ring.give_back()
        taken.popleft()
    assert ring.take(100) == 0 and ring.take(1) is None
