# SPDX-License-Identifier: Apache-2.0
"""What is asked of the driver for V on the host, with stand-ins for streams, events and pinning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_pyramid.step.hooks import HostMemory
from vllm_pyramid.worker import copy_stream as copies


class Stream:
    """Notes what it is asked for."""

    is_done = False

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> Any:
        self.log.append(f"{self.name} records")
        return SimpleNamespace(of=self.name, query=lambda: self.is_done)

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for event of {event.of}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of two streams: the step's, and one that is made."""
    found: list[str] = []
    now = [Stream("step", found)]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def test_a_copy_is_behind_the_step_and_the_step_behind_what_it_waits_for(log: list[str]) -> None:
    stream: Any = copies.copies_of(torch.device("cuda"))

    def copy(what: str, *, to: str) -> None:
        log.append(f"{torch.cuda.current_stream().name}: {what} to {to}")  # type: ignore[attr-defined]

    mark = stream.launch(copy, "V", to="host")
    assert log == [
        *("step records", "copies waits for event of step", "copies: V to host"),
        "copies records",
    ]
    log.clear()
    stream.wait(mark)
    assert log == ["step waits for event of copies"] and not stream.is_done(mark)
    stream._stream.is_done = True
    assert stream.is_done(mark)
    assert copies.copies_of(torch.device("cpu")) is None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Pins what it is asked to, unless `error` is set."""
    found = SimpleNamespace(pinned={}, error=0)

    def pin(address: int, size: int, flags: int) -> int:
        if not found.error:
            found.pinned[address] = (size, flags)
        return int(found.error)

    cudart = SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=found.pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x.data_ptr() in found.pinned)
    monkeypatch.setattr(copies, "get_accelerator_view_from_cpu_tensor", lambda x: x.view(-1))
    return found


def test_memory_is_pinned_as_large_as_it_is(driver: SimpleNamespace) -> None:
    make = copies.host_memory_of(torch.device("cuda"))
    memory = make(1000)  # PyTorch's own would be 1,024
    assert memory.bytes.numel() == 1000 and not memory.bytes.any()
    assert driver.pinned == {memory.bytes.data_ptr(): (1000, 3)}  # portable and mapped
    memory.release()
    assert driver.pinned == {}
    assert copies.host_memory_of(torch.device("cpu")) is HostMemory


def test_memory_that_is_not_pinned_is_an_error(driver: SimpleNamespace) -> None:
    driver.error = 2
    with pytest.raises(RuntimeError, match=r"did not pin .* \(error 2\): set a smaller --kv-swap"):
        copies.PinnedMemory(1 << 20)
