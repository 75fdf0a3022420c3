# SPDX-License-Identifier: Apache-2.0
"""States over NIXL: vLLM's agent for RDMA and its like, in place of TCP.

The engine that prefills copies the parts of its states into memory of its host that its agent has
registered once. Over TCP it says where a part is; the agent of the decoding engine reads it there.
Heads are small and travel over TCP.

    GET NAME of a part     address, bytes, metadata of the agent
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from errno import EIO, ENOSPC, ETIMEDOUT
from struct import Struct
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed import nixl_utils

from vllm_pyramid.kv_cache.bundle_file import DamagedFileError
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.tcp import TcpTransport, is_head

_PLACE = Struct("<QQ")  # the address and the bytes of a part, which its agent's metadata follow
_LARGEST_PLACE = 1 << 16
_POLL_S = 0.0005


class _Read(NamedTuple):
    """A part that the agent reads into `data`, which is `registered` with it."""

    handle: Any
    registered: Any
    data: np.ndarray


class _SharedMemory:
    """Memory that agents of other engines may read, given out in ranges."""

    def __init__(self, num_bytes: int) -> None:
        self.data = np.empty(num_bytes, np.uint8)
        self._ends: dict[int, int] = {}  # of the ranges in use, by their starts
        self._lock = Lock()

    def take(self, num_bytes: int) -> int:
        """Return the start of a free range; OSError: there is none."""
        start = 0
        with self._lock:
            for first, end in sorted(self._ends.items()):
                if first - start >= num_bytes:
                    break
                start = end
            if start + num_bytes > len(self.data):
                raise OSError(
                    ENOSPC, f"states wait in too much of the {len(self.data)} bytes at most"
                )
            self._ends[start] = start + num_bytes
        return start

    def free(self, start: int) -> None:
        with self._lock:
            del self._ends[start]


class NixlTransport(TcpTransport):
    """A `Transport` that reads parts with a NIXL agent; `place` is as in `make_transport`.

    ValueError: NIXL is not installed. OSError: the port is taken.
    """

    def __init__(self, settings: TransferSettings, place: int) -> None:
        self._lock = Lock()  # of the agent, which threads share
        self._agent: Any = None
        self._known: dict[bytes, str] = {}  # names of other agents, by their metadata
        # Reads that did not end in time. The agent may still write: their memory stays.
        self._late: list[_Read] = []
        self._memory: _SharedMemory | None = None
        if place:  # a scheduler has heads alone
            self._agent = _new_agent()
            if settings.sends:
                self._memory = _SharedMemory(settings.limit_bytes)
                self._agent.register_memory([(*_whole(self._memory.data), "")], "DRAM")
                self._metadata: bytes = self._agent.get_agent_metadata()
                self._known[self._metadata] = self._agent.name  # an engine may be its own peer
        super().__init__(settings, place)

    def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        num_bytes = sum(piece.nbytes for piece in pieces)
        if is_head(name) or not num_bytes:
            super().put(name, pieces)
            return
        assert self._memory is not None, "it sends nothing"
        memory = self._memory
        start = at = memory.take(num_bytes)
        for piece in pieces:
            memory.data[at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
            at += piece.nbytes
        place = _PLACE.pack(memory.data.ctypes.data + start, num_bytes) + self._metadata
        self._serve(name, [memoryview(place)], 0, lambda: memory.free(start))

    def get(self, name: str, peer: str, largest: int) -> memoryview | None:
        if is_head(name):
            return super().get(name, peer, largest)
        if (told := super().get(name, peer, _LARGEST_PLACE)) is None:
            return None
        if len(told) <= _PLACE.size:
            raise DamagedFileError("it does not say where it is")
        address, num_bytes = _PLACE.unpack_from(told)
        if not 0 < num_bytes <= largest:
            raise DamagedFileError("it is too large")
        data = np.empty(num_bytes, np.uint8)
        try:
            self._read(bytes(told[_PLACE.size :]), address, data)
        except OSError:
            raise
        except Exception as error:  # the agent's own kinds
            raise OSError(EIO, f"NIXL could not read {name} of {peer}: {error!r}") from error
        return data.data

    def _read(self, metadata: bytes, address: int, data: np.ndarray) -> None:
        """Fill `data` with what is at an address of another agent's process."""
        agent = self._agent
        with self._lock:
            self._late = [read for read in self._late if not self._ended(read)]
            if (remote := self._known.get(metadata)) is None:
                remote = self._known[metadata] = agent.add_remote_agent(metadata)
            registered = agent.register_memory([(*_whole(data), "")], "DRAM")
            try:
                mine = agent.get_xfer_descs([_whole(data)], "DRAM")
                theirs = agent.get_xfer_descs([(address, data.nbytes, 0)], "DRAM")
                handle = agent.initialize_xfer("READ", mine, theirs, remote)
                agent.transfer(handle)
            except Exception:  # nothing is under way
                agent.deregister_memory(registered)
                raise
        read, end = _Read(handle, registered, data), time.monotonic() + self._wait_s
        while True:
            with self._lock:
                if ended := self._ended(read):
                    break
                if time.monotonic() > end:
                    self._late.append(read)
                    raise OSError(ETIMEDOUT, f"NIXL read nothing in {self._wait_s:g} s")
            time.sleep(_POLL_S)
        if ended != "DONE":
            raise OSError(EIO, f"NIXL's transfer ended as {ended}")

    def _ended(self, read: _Read) -> str:
        """Return how a read has ended, and let go of its memory; empty while it is under way."""
        state: str = self._agent.check_xfer_state(read.handle)
        if state == "PROC":
            return ""
        self._agent.release_xfer_handle(read.handle)
        self._agent.deregister_memory(read.registered)
        return state


def _new_agent() -> Any:
    """Make an agent on UCX, under a name that no other has. ValueError: NIXL is not installed."""
    if not nixl_utils.is_nixl_available():
        raise ValueError(
            "kv_connector_extra_config of PyramidConnector: nixl needs the package nixl: install "
            "vllm-pyramid[nixl], or leave the key out"
        )
    config = nixl_utils.nixl_agent_config(backends=["UCX"])
    return nixl_utils.NixlWrapper(f"pyramid-{secrets.token_hex(8)}", config)


def _whole(data: np.ndarray) -> tuple[int, int, int]:
    """Return the agent's description of an array: address, bytes, and device."""
    return data.ctypes.data, data.nbytes, 0
